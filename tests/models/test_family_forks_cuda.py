"""Forks of a long conversation on a GPU, in every recurrent family."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.cuda_engines import held, load_tiny, make
from tests.support.models.forks import FORKS, check_forks
from tests.support.models.hybrid_models import HYBRIDS
from weft import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LENGTH, MEMORY = 20_000, 1 << 30
LONG = {"max_length": LENGTH + 200, "max_sequences": FORKS}


def load_long(family: str, exact: bool) -> LLM:
    dtype = "bfloat16" if exact else "float32"
    return load_tiny(family, dtype, exact=exact, memory=MEMORY, **LONG)


@pytest.mark.parametrize("exact", [False, True], ids=["usual", "exact"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_64_forks_of_20000_tokens_on_a_gpu_compute_less_than_a_cell(family: str, exact: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    llm = held(f"{family} forks {exact}", lambda: load_long(family, exact))
    engine = make(llm, exact=exact, paranoid=False, **LONG)
    computed = check_forks(engine, LENGTH)
    print(f"{family} {'exact' if exact else 'usual'}: first {computed[0]}, others at most {max(computed[1:])}")

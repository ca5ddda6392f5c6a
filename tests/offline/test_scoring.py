"""`LLM.score` equals the public implementation, and computes what prompts share once."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.support.models import tiny_model
from tests.support.models.oracle import Oracle
from tests.support.models.plain_models import QWEN3
from weft import LLM, RequestError
from weft.answers.pair_scores import AFTER, BEFORE

DOCUMENTS = ["Weft is a loom's thread.", "A short one.", "Cells are 64 tokens long. " * 6]
# In the tiny tokenizer, a token is a byte.
ANSWERS = ("y", "n")
OPTIONS = {"dtype": "float32", "memory": "16MiB", "threads": 1, "max_length": 2000, "device": "cpu", "draft": "off"}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(QWEN3.variant(vocab_size=259))


@pytest.fixture
def llm(oracle, tmp_path):
    oracle.save(tmp_path)
    for file in tiny_model.FOLDER.glob("*token*"):
        shutil.copy(file, tmp_path)
    with LLM(str(tmp_path), progress=False, **OPTIONS) as found:
        yield found


def expected(oracle: Oracle, instruction: str, query: str, document: str) -> float:
    text = f"{BEFORE}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{AFTER}"
    logits = oracle.logits(tiny_model.tokenizer().encode(text, special=False))[-1]
    return float(logits[[ord(word) for word in ANSWERS]].softmax(0)[0])


def test_scores_equal_the_public_implementation(llm, oracle):
    instruction = "Find what the user asks for. " * 10
    found = llm.score("What is Weft?", DOCUMENTS, use_tqdm=False, instruction=instruction, answers=ANSWERS)
    wanted = [expected(oracle, instruction, "What is Weft?", each) for each in DOCUMENTS]
    torch.testing.assert_close([each.outputs.score for each in found], wanted, atol=1e-5, rtol=0)
    assert len({round(each, 4) for each in wanted}) == len(wanted), "the documents matter"
    # The system prompt and the instruction: computed for the first document, and read by the others.
    assert [each.num_cached_tokens >= 256 for each in found] == [False, True, True]


def test_queries_are_paired_with_documents(llm):
    each = llm.score(["a", "b"], DOCUMENTS[:2], use_tqdm=False, answers=ANSWERS)
    alone = [llm.score(query, text, use_tqdm=False, answers=ANSWERS)[0] for query, text in zip("ab", DOCUMENTS)]
    assert [one.outputs.score for one in each] == pytest.approx([one.outputs.score for one in alone], abs=1e-6)


def test_what_cannot_be_scored_is_refused_by_name(llm):
    with pytest.raises(RequestError, match="answers must be words of one token each; 'yes' has 3"):
        llm.score("a", "b", use_tqdm=False)
    with pytest.raises(RequestError, match="queries must be one, or as many as the 3 documents; got 2"):
        llm.score(["a", "b"], DOCUMENTS, use_tqdm=False, answers=ANSWERS)
    with pytest.raises(RequestError, match="documents and queries must be strings"):
        llm.score("a", [3], use_tqdm=False, answers=ANSWERS)

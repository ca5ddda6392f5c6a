"""A hybrid so small that a step takes a millisecond, for tests: random weights, bytes as tokens. It talks nonsense.

The folder `tiny` has its configuration, its tokenizer (ids 0 to 255 are bytes, SPECIALS follow) and a plain chat
template; weights are drawn when it is loaded. No torch.
"""

from __future__ import annotations

from pathlib import Path

from weft.text.template import load_template
from weft.text.tokenizer import Tokenizer, load_tokenizer

FOLDER = Path(__file__).parent / "tiny"
NAME = FOLDER.name
# As options, and as arguments of a command; a server or `LLM` with these needs no other model.
OPTIONS = {"model": str(FOLDER), "weights": "dummy"}
ARGUMENTS = ["--model", str(FOLDER), "--weights", "dummy"]
SPECIALS = ("<|start|>", "<|end|>", "<|pad|>")


def no_time() -> float:
    """Return the processor time that masks of grammars take in a test, however slow the machine is."""
    return 0.0


def tokenizer() -> Tokenizer:
    """Bytes as tokens.

    >>> tokenizer().encode("Aé<|end|>")
    [65, 195, 169, 257]
    """
    found = load_tokenizer(FOLDER)
    assert found is not None
    return found


def template() -> str:
    found = load_template(FOLDER, {})
    assert found is not None
    return found.source


TEMPLATE = template()

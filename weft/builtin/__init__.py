"""The built-in model: a small hybrid with random weights, so that a first run needs no download. It talks nonsense.

Its tokenizer has the 256 bytes and three special tokens; both are made here, in code. No torch.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from weft.text.detokenizer import BYTE_OF
from weft.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent
SEED = 20261115
NOTICE = "weft: the built-in model has random weights and talks nonsense; choose a real one with --model or LLM(model)"

# Token ids 0 to 255 are bytes; these follow.
SPECIALS = ("<|start|>", "<|end|>", "<|pad|>")

TEMPLATE = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{% endif -%}
"""


def tokenizer() -> Tokenizer:
    """Bytes as tokens.

    >>> tokenizer().encode("Aé<|end|>")
    [65, 195, 169, 257]
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return Tokenizer(backend, {"eos_token": "<|end|>", "pad_token": "<|pad|>"})

"""Converts text to token ids and back, with the files next to a model's weights.

Reads tokenizer.json (the `tokenizers` library), and the special tokens and end tokens of the configuration files. The
special tokens around a prompt are those that tokenizer.json's own post-processor adds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers

from weft.base.errors import InvalidField, ModelError
from weft.base.gguf.header import is_gguf, read_header
from weft.base.hub.downloads import snapshot
from weft.base.hub.short_names import hub_id_of
from weft.text.detokenizer import Detokenizer, Vocabulary
from weft.text.gguf_tokenizer import end_ids, tokenizer_of
from weft.text.patterns import are_linear, check_pattern, patterns_of

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
# How much shorter normalisation may make a text, by combining letters with their marks.
NORMALISED = 4
# Far beyond any published vocabulary.
MAX_FILE_BYTES = 512 << 20
# Texts that make bad patterns fail: many kinds of near matches.
PROBES = ("a" * 30 + "!", " " * 30 + "x", "1" * 30 + "!", "\n" * 30 + "x", "Aa1 ,.é\n" * 8)
# Words whose tokens the library remembers for good, in every thread that encodes: up to 8 kB for each. Its default is
# 10,000. Reading English and code takes 7 % longer with this number, and 19 % longer without any.
REMEMBERED_WORDS = 2000
# Characters of texts that the calling thread encodes. For more, the library starts a thread for each core.
FEW_CHARACTERS = 1 << 16
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes prompts, decodes answers. `specials` are the named special tokens (bos_token, ...) for templates.

    `is_linear` is whether encoding is known to take linear time. If it is not, a short text may take minutes.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, specials: Mapping[str, str] | None = None, end_tokens: Iterable[int] = ()
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        if hasattr(backend.model, "_resize_cache"):
            backend.model._resize_cache(REMEMBERED_WORDS)
        self.backend = backend
        self.specials = dict(specials or {})
        self.vocabulary = Vocabulary(backend)
        # No token has more characters. Text that is normalised first may have been longer.
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self.characters_per_token = longest * (1 if backend.normalizer is None else NORMALISED)
        self.is_linear = are_linear(patterns_of(backend))
        self.end_tokens = frozenset(end_tokens) | self._own_end()

    def _own_end(self) -> frozenset[int]:
        token = self.backend.token_to_id(self.specials.get("eos_token", ""))
        return frozenset() if token is None else frozenset([token])

    @property
    def size(self) -> int:
        """One more than the highest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def digest(self) -> str:
        """A hash of all tokens and their ids. Models with the same one read the same token ids."""
        found = sorted((number, token) for token, number in self.backend.get_vocab(with_added_tokens=True).items())
        return sha256(json.dumps(found).encode()).hexdigest()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text; `special` adds what the model expects around a prompt, such as BOS."""
        return self.encode_all([text], special)[0]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts, with what tokenizer.json adds around and between them."""
        for text in (first, second):
            check_unicode(text)
        with _own_errors():
            found: list[int] = self.backend.encode(first, second).ids
            return found

    def encode_all(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        for text in texts:
            check_unicode(text)
        with _own_errors():
            if sum(map(len, texts)) <= FEW_CHARACTERS:
                return [self.backend.encode(text, add_special_tokens=special).ids for text in texts]
            return [found.ids for found in self.backend.encode_batch(list(texts), add_special_tokens=special)]

    def ends(self, text: str) -> list[int]:
        """Return where each token of a text ends in it, in characters."""
        check_unicode(text)
        with _own_errors():
            return [end for _, end in self.backend.encode(text, add_special_tokens=False).offsets]

    def detokenizer(self, skip_special: bool = True, shown: Collection[str] = ()) -> Detokenizer:
        """Return a detokenizer that omits special tokens, except those in `shown`."""
        return self.vocabulary.detokenizer(skip_special, shown)

    def decode(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of these tokens, decoded at once."""
        detokenizer = self.detokenizer(skip_special)
        return "".join([*map(detokenizer.feed, tokens), detokenizer.flush()])

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token with this text, if there is one."""
        token = self.backend.token_to_id(text)
        return token if token in self.vocabulary.special else None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a single token, which may be a part of a character."""
        return self.vocabulary.bytes_of(token)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Report an error of the library as one of the text."""
    try:
        yield
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        raise InvalidField(
            "prompt", f"has a text that this model's tokenizer.json fails on: {_first_line(error)}"
        ) from None


def check_unicode(text: str) -> None:
    """Refuse a text that no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise InvalidField("prompt", f"has {found!r} at character {error.start}: half of a surrogate pair") from None


def _is_the_librarys(error: BaseException) -> bool:
    """Return whether an error is the library's own: plain exceptions, and panics, which are not `Exception`s."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _first_line(error: BaseException) -> str:
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a model's folder or GGUF file, or None if it has none.

    The model then takes token ids only.
    """
    path = folder if is_gguf(folder) else folder / "tokenizer.json"
    if not path.is_file():
        return None
    if not is_gguf(path) and path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(f"{path} must have at most {MAX_FILE_BYTES} bytes")
    try:
        read = tokenizer_of(path, read_header(path).metadata) if is_gguf(path) else from_file(path)
        if read is None:
            return None
        found = Tokenizer(*read, end_tokens(folder))
        found.encode_all(PROBES)
    except ModelError:
        raise
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        raise ModelError(f"cannot use {path} as a tokenizer: {_first_line(error)}") from None
    return found


def from_file(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the tokenizer of a tokenizer.json, and the named special tokens beside it."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    for pattern in patterns_of(backend):
        check_pattern(path, pattern)
    return backend, special_tokens(path.parent)


def special_tokens(folder: Path) -> dict[str, str]:
    """Return named special tokens of tokenizer_config.json, or of the older special_tokens_map.json."""
    stated = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    found = {name: stated[name] for name in SPECIAL_NAMES if stated.get(name)}
    for name, token in found.items():
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            raise ModelError(f"{folder}: {name} must be a string or an object with a string as content")
        found[name] = content
    return found


def end_tokens(folder: Path) -> frozenset[int]:
    """Return the ids that end an answer, from generation_config.json or config.json: one number or a list."""
    if is_gguf(folder):
        return end_ids(folder, read_header(folder).metadata)
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name)
        stated = config.get("eos_token_id")
        if stated is None and isinstance(config.get("text_config"), dict):
            stated = config["text_config"].get("eos_token_id")
        if stated is not None:
            return frozenset(_token_ids(folder / name, stated))
    return frozenset()


def _token_ids(path: Path, stated: Any) -> list[int]:
    found = stated if isinstance(stated, list) else [stated]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
            raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, got {token!r:.80}")
    return found


def text_place(place: Path) -> Path:
    """Return where the texts of a model are: its folder, or the GGUF file that has all."""
    return place if place.is_dir() or is_gguf(place) else place.parent


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, which may be missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object")
    return value


def find_text_files(place: str) -> Path:
    """Return the folder of a tokenizer: a local one, or the hub's, of which only the small files are downloaded."""
    local = Path(place).expanduser()
    if local.is_dir() or (is_gguf(local) and local.is_file()):
        return local
    place = hub_id_of(place)
    if place.count("/") != 1 or place.startswith((".", "~", "/")):
        raise ModelError(f"{place} is neither a folder with a tokenizer nor a hub id such as 'owner/name'")
    return snapshot(place, FILES)

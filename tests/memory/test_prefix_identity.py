"""The key of a cell is a function of its identity and its tokens: nothing else changes it, and all of them do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers.disk_blocks import IDENTITY, LAYOUT
from weft.memory.identity import Identity
from weft.memory.keys import PrefixIdentity
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.format import read_layout
from weft.memory.tiers.remote.tier import ObjectNames
from weft.transfer.messages import Contract

Patch = pytest.MonkeyPatch
CELLS = (1, 4)
OTHER = Identity(*[b"b" * 16] * 3, "Tiny 2", True)


@dataclass(frozen=True)
class Content:
    """Everything that the state of a cell depends on: all that its name may depend on."""

    model: Identity
    prefix: PrefixIdentity
    tokens: tuple[int, ...]
    decoded_from: int | None

    @property
    def name(self) -> tuple[str, bytes]:
        """The name of the last cell in a store, and its key."""
        key = self.prefix.keys(np.array(self.tokens, np.int32), decoded_from=self.decoded_from)[-1]
        return ObjectNames(self.model.fingerprint).of_unit(Kind.PAGE, bytes(16), key, len(self.tokens)), key

    @property
    def decoded(self) -> tuple[int, ...]:
        """How many tokens of each cell were prompt, if that matters."""
        cell, end = self.prefix.cell, len(self.tokens)
        first = end if self.prefix.form is None or self.decoded_from is None else self.decoded_from
        return tuple(min(cell, max(0, first - start)) for start in range(0, end, cell))

    @property
    def meaning(self) -> tuple[object, ...]:
        return self.model, astuple(self.prefix), self.tokens, self.decoded


# Texts that could be taken for parts of an encoding, or for several of them.
texts = st.lists(st.sampled_from([b"", b"a", b"4 ", b"1 a", b"weft/1 4 ", b"exact ", b"decoded 2", bytes(32)])).map(
    b"".join
)
digests = st.sampled_from([b"a" * 16, b"b" * 16])
models = st.builds(Identity, digests, digests, digests, st.sampled_from(["Tiny 1", "Tiny 2"]), st.booleans())
prefixes = st.builds(
    PrefixIdentity,
    cell=st.sampled_from(CELLS),
    salt=texts,
    form=st.none() | texts.map(lambda text: text.hex()),
    before=texts,
    adapter=texts,
    version=texts,
)


@st.composite
def contents(draw: st.DrawFn) -> Content:
    prefix = draw(prefixes)
    cells = draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 2), min_size=cells * prefix.cell, max_size=cells * prefix.cell))
    return Content(draw(models), prefix, tuple(tokens), draw(st.none() | st.integers(0, len(tokens) + 1)))


def variations(one: Content, other: Content) -> list[Content]:
    """Return the first one with each part of the other in its place, alone and beside each other part."""
    if other.prefix.cell != one.prefix.cell:
        fits = len(one.tokens) % other.prefix.cell == 0
        tokens = one.tokens if fits else other.tokens
        return [one, replace(one, prefix=replace(one.prefix, cell=other.prefix.cell), tokens=tokens), other]
    return [one, *(mixed(one, other, pair) for pair in combinations_with_replacement(PARTS, 2)), other]


PARTS = ["tokens", "decoded_from", *(each.name for kind in (PrefixIdentity, Identity) for each in fields(kind))]


def mixed(one: Content, other: Content, taken: Iterable[str]) -> Content:
    def parts_of(whole: object) -> dict[str, object]:
        return {name: getattr(whole, name) for name in taken if hasattr(whole, name)}

    prefix, model = replace(one.prefix, **parts_of(other.prefix)), replace(one.model, **parts_of(other.model))
    return replace(one, prefix=prefix, model=model, **parts_of(other))


SMALL = Content(IDENTITY, PrefixIdentity(4, b"a"), (1, 2, 3, 4), None)


def with_prefix(**changes: object) -> Content:
    return replace(SMALL, prefix=replace(SMALL.prefix, **changes))


def check_names(contents: list[Content]) -> None:
    names, meanings = [each.name for each in contents], [each.meaning for each in contents]
    assert len(set(names)) == len({name for name, _ in names}) == len(set(meanings))
    assert len(set(zip(names, meanings, strict=True))) == len(set(meanings))
    # What an engine compares: its own model is that of all its cells.
    keys, own = [key for _, key in names], [meaning[1:] for meaning in meanings]
    assert len(set(keys)) == len(set(own)) == len(set(zip(keys, own, strict=True)))
    assert len({each.prefix.root for each in contents}) == len({each.prefix for each in contents})


OPPOSITE = PrefixIdentity(4, b"b", "b", b"b", b"b", b"b")
EXAMPLES = [
    (SMALL, Content(OTHER, replace(OPPOSITE, form=""), (2,) * 4, 2)),
    (SMALL, Content(OTHER, replace(OPPOSITE, cell=1), (2,) * 4, 2)),
    (with_prefix(form="a"), Content(OTHER, OPPOSITE, (2,) * 4, 2)),
]


def check_examples() -> None:
    for one, other in EXAMPLES:
        check_names(variations(one, other))


def test_names_of_examples_are_equal_if_and_only_if_all_that_a_state_depends_on_is() -> None:
    check_examples()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(contents(), contents())
def test_names_are_equal_if_and_only_if_all_that_a_state_depends_on_is(one: Content, other: Content) -> None:
    check_names(variations(one, other))


@given(contents(), st.integers(1, 3))
def test_keys_do_not_depend_on_how_a_text_was_cut(content: Content, cut: int) -> None:
    prefix, decoded = content.prefix, content.decoded_from
    tokens, place = np.array(content.tokens, np.int32), cut * content.prefix.cell
    first = prefix.keys(tokens[:place], decoded_from=decoded)
    rest = prefix.keys(tokens[place:], first[-1], None if decoded is None else decoded - place)
    assert first + rest == prefix.keys(tokens, decoded_from=decoded)


def test_the_parts_of_a_root_cannot_be_moved_between_them() -> None:
    """All ways to cut one text into the parts of an identity give different roots."""
    text = b"weft/1 4 1 2 "
    cuts = [(i, j, k) for i in range(14) for j in range(i, 14) for k in range(j, 14)]
    roots = {
        PrefixIdentity(4, text[:i], before=text[i:j], adapter=text[j:k], version=text[k:]).root for i, j, k in cuts
    }
    assert len(roots) == len(cuts)
    # Of the parts itself: a salt that spells how another identity begins.
    assert PrefixIdentity(4, b"exact " + bytes(32) + b" a").root != PrefixIdentity(4, b"a", "form").root


def test_keys_of_usual_engines_are_those_of_all_versions() -> None:
    """What was stored before is found again: computed once, with the version that began to store cells."""
    keys = PrefixIdentity(64, b"tenant").keys(np.arange(128, dtype=np.int32))
    assert [key.hex()[:16] for key in keys] == GOLDEN


GOLDEN = ["fe61e010f5fa0c04", "e69816e45b587e87"]


def test_a_contract_and_a_file_differ_if_anything_of_the_model_does() -> None:
    models = [IDENTITY, *(replace(IDENTITY, **{name: b"x" * 16}) for name in ("configuration", "weights", "layout"))]
    models += [replace(IDENTITY, revisions="Tiny 2"), replace(IDENTITY, exact=True)]
    assert len({Contract(model.fingerprint, {}).fingerprint for model in models}) == len(models)
    found = [read_layout(replace(LAYOUT, identity=model).encode()) for model in models]
    assert [each.identity for each in found if each is not None] == models


# planted bugs: a key that lacks a field, or confuses two -------------------------------------------------------------


def forget(patch: Patch, **values: object) -> None:
    original = PrefixIdentity.root.fget
    assert original is not None
    patch.setattr(PrefixIdentity, "root", property(lambda self: original(replace(self, **values))))


FORGOTTEN = {"salt": b"", "form": None, "before": b"", "adapter": b"", "version": b"", "cell": 4}


@pytest.mark.parametrize("field", FORGOTTEN)
def test_a_key_without_a_field_is_noticed(field: str, monkeypatch: Patch) -> None:
    assert set(FORGOTTEN) == {each.name for each in fields(PrefixIdentity)}
    forget(monkeypatch, **{field: FORGOTTEN[field]})
    with pytest.raises(AssertionError):
        check_examples()


def test_parts_without_their_lengths_are_noticed(monkeypatch: Patch) -> None:
    def joined(self: PrefixIdentity) -> bytes:
        return original(replace(self, salt=self.salt + self.before + self.adapter + self.version, **EMPTY))

    original = PrefixIdentity.root.fget
    assert original is not None
    monkeypatch.setattr(PrefixIdentity, "root", property(joined))
    with pytest.raises(AssertionError):
        test_the_parts_of_a_root_cannot_be_moved_between_them()


EMPTY: dict[str, object] = {"before": b"", "adapter": b"", "version": b""}


@pytest.mark.parametrize("field", ["configuration", "weights", "layout", "revisions", "exact"])
def test_a_fingerprint_without_a_field_is_noticed(field: str, monkeypatch: Patch) -> None:
    original = Identity.fingerprint.fget
    assert original is not None
    same = {field: {"revisions": "Tiny 1", "exact": False}.get(field, b"a" * 16)}
    monkeypatch.setattr(Identity, "fingerprint", property(lambda self: original(replace(self, **same))))
    with pytest.raises(AssertionError):
        check_examples()


@pytest.mark.parametrize("change", ["tokens", "decoded"])
def test_a_key_without_its_content_is_noticed(change: str, monkeypatch: Patch) -> None:
    def keys(self: PrefixIdentity, tokens, after=None, decoded_from=None):
        tokens = np.zeros_like(tokens) if change == "tokens" else tokens
        return original(self, tokens, after, None if change == "decoded" else decoded_from)

    original = PrefixIdentity.keys
    monkeypatch.setattr(PrefixIdentity, "keys", keys)
    with pytest.raises(AssertionError):
        check_examples()

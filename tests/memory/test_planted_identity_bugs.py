"""Bugs in what names a stored state, planted from outside and caught. `docs/lab/planted-bugs.md` has the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.support.models.identities import STORED, WAYS, check_reads_nothing
from tests.support.tiers.planted_keys import plant_identity
from tests.support.tiers.salts import check_salts_in_a_store, check_salts_of_transfers, check_salts_on_disk
from weft.models import weights
from weft.start import loading

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    """A bug and all checks that must notice it."""

    name: str
    sow: Callable[[Patch], None]
    checks: tuple[Callable[[], object], ...]


PLANTS: list[Plant] = []


def with_another(other: str) -> tuple[Callable[[], object], ...]:
    return tuple(lambda way=way: check_reads_nothing(way, other) for way in WAYS)


def with_longer_salts() -> tuple[Callable[[], object], ...]:
    return lambda: check_salts_on_disk(Path(mkdtemp())), check_salts_in_a_store, check_salts_of_transfers


def plant(*checks: Callable[[], object]) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def planted(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTS.append(Plant(sow.__name__, sow, checks))
        return sow

    return planted


def without(patch: Patch, **parts: object) -> None:
    original = loading.identity_of
    patch.setattr(loading, "identity_of", lambda *inputs: replace(original(*inputs), **parts))


@plant(*with_another("one number"), *with_another("epsilon"), *with_another("rotary"))
def an_identity_has_neither_weights_nor_configuration(patch: Patch) -> None:
    without(patch, weights=bytes(16), configuration=bytes(16))


@plant(*with_another("one number"), *with_another("other weights"))
def an_identity_has_the_shapes_of_weights_and_not_their_values(patch: Patch) -> None:
    shapes = weights.weights_digest
    patch.setattr(weights, "weights_digest", lambda model: shapes(model) and bytes(16))


@plant(*with_another("newer family"), *with_another("newer package"))
def an_identity_has_no_numbers_of_what_the_code_computes(patch: Patch) -> None:
    without(patch, revisions="Weft")


@plant(*with_longer_salts())
def keys_know_the_first_bytes_of_a_salt_only(patch: Patch) -> None:
    plant_identity(patch, lambda identity: replace(identity, salt=identity.salt[:32]))


@pytest.mark.parametrize("bug", PLANTS, ids=lambda p: p.name)
def test_a_planted_identity_bug_is_caught_in_every_way_to_store_states(bug: Plant, monkeypatch: Patch) -> None:
    bug.sow(monkeypatch)
    # What is stored comes from the same code as what reads it.
    for stored in STORED:
        stored.cache_clear()
    try:
        for check in bug.checks:
            with pytest.raises(AssertionError, match="were read"):
                check()
    finally:
        for stored in STORED:
            stored.cache_clear()

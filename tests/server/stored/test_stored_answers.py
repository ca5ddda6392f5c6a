"""Stored answers are bounded in number, bytes and time, per key, whatever one key stores."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from weft.base.errors import RequestError
from weft.base.tenants import tenant_digest
from weft.server.access.auth import Tenant
from weft.server.stored.answers import MOST_SECONDS, StoredAnswer, StoredAnswers
from weft.server.stored.file import RecordFile

ONE, TWO = Tenant(b"1" * 32), Tenant(b"2" * 32)


def stored_answer(name: str, tenant: Tenant, size: int = 100, created: float = 0.0) -> StoredAnswer:
    return StoredAnswer(
        id=name,
        tenant=tenant_digest(tenant.salt),
        created=created,
        cache_salt=None,
        tokens=bytes(size),
        answers=[b"abcd"],
    )


def held(stored: StoredAnswers, tenant: Tenant, names: list[str]) -> list[str]:
    found = []
    for name in names:
        with suppress(RequestError):
            found.append(stored.find(name, tenant).id)
    return found


def test_the_key_that_stores_most_loses_its_oldest() -> None:
    stored = StoredAnswers(10_000, now=lambda: 0.0)
    few, many = [f"few{n}" for n in range(5)], [f"many{n}" for n in range(200)]
    for name in few:
        stored.add(stored_answer(name, TWO))
    for name in many:
        stored.add(stored_answer(name, ONE))
        assert stored.held_bytes <= 10_000
    assert held(stored, TWO, few) == few
    kept = held(stored, ONE, many)
    assert kept == many[-len(kept) :]
    assert held(stored, ONE, few) == []
    stored.add(stored_answer("large", ONE, 20_000))
    assert held(stored, ONE, ["large"]) == []
    stored.close()


def test_old_answers_are_removed() -> None:
    now = [0.0]
    stored = StoredAnswers(10_000, now=lambda: now[0])
    stored.add(stored_answer("old", ONE))
    now[0] = MOST_SECONDS
    stored.add(stored_answer("new", ONE, created=now[0]))
    assert held(stored, ONE, ["old", "new"]) == ["old", "new"]
    now[0] += 1
    assert held(stored, ONE, ["old", "new"]) == ["new"]
    stored.close()


def test_answers_survive_a_restart_and_removed_ones_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "responses"

    def opened() -> StoredAnswers:
        return StoredAnswers(100_000, RecordFile(path, 200_000), now=lambda: 0.0)

    stored = opened()
    for tenant, letter in ((ONE, b"S"), (TWO, b"T")):
        for n in range(3):
            answer = stored_answer(f"{letter.decode()}{n}", tenant)
            stored.add(
                StoredAnswer(**{**{f: getattr(answer, f) for f in answer.__struct_fields__}, "body": letter * 50})
            )
    asyncio.run(stored.delete("S1", ONE))
    with pytest.raises(RequestError):
        asyncio.run(stored.delete("S0", TWO))
    stored.close()
    assert path.read_bytes().count(b"S" * 50) == 2
    stored = opened()
    assert held(stored, ONE, ["S0", "S1", "S2"]) == ["S0", "S2"]
    assert asyncio.run(stored.drop(tenant_digest(ONE.salt))) == 2
    assert b"S" * 50 not in path.read_bytes()
    assert path.read_bytes().count(b"T" * 50) == 3
    assert asyncio.run(stored.drop(None)) == 3
    assert b"T" * 50 not in path.read_bytes()
    stored.close()

"""What was compiled or spelled for one tenant is not used for another: the time that it saves would tell of it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.support.models import tiny_model
from tests.support.models.tiny_model import no_time
from tests.support.servers.http_server import serving
from tests.support.servers.http_values import SCHEMA
from weft.base.grammar import Grammar
from weft.server.settings import ServerSettings
from weft.text import grammar as grammar_module
from weft.text.grammar import MAX_COMPILED, Grammars
from weft.text.tokenizer import Tokenizer

CITY = Grammar("json_schema", json.dumps({"enum": ["Reykjavik"]}))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the grammars that the library compiles, as they come."""
    found: list[str] = []
    matcher = grammar_module.LLMatcher

    def compile_counted(trie: Any, source: str, **more: Any) -> Any:
        found.append(source)
        return matcher(trie, source, **more)

    monkeypatch.setattr(grammar_module, "LLMatcher", compile_counted)
    return found


def grammars() -> Grammars:
    return Grammars(tiny_model.tokenizer(), 259, no_time)


def test_a_grammar_is_compiled_once_for_each_salt(compiled: list[str]) -> None:
    made = grammars()
    for salt, times in ((b"a", 1), (b"a", 1), (b"b", 2), (b"b", 2), (b"", 3), (b"a", 3)):
        made(CITY, frozenset(), salt)
        assert len(compiled) == times


@pytest.mark.parametrize("field", ["key", "cache_salt"])
def test_a_schema_is_compiled_anew_for_another_tenant_over_http(compiled: list[str], field: str) -> None:
    keys = ("first-key", "second-key")
    with serving(ServerSettings(api_keys=keys)) as served:
        for tenant, times in ((0, 1), (0, 1), (1, 2), (1, 2), (0, 2)):
            key = keys[tenant if field == "key" else 0]
            body = {"prompt": "a", "max_tokens": 40, "temperature": 0, "guided_json": SCHEMA}
            more = {} if field == "key" else {"cache_salt": str(tenant)}
            headers = {"authorization": f"Bearer {key}"}
            served.post("/v1/completions", body | more, headers=headers)
            assert len(compiled) == times


def test_all_tenants_together_have_so_many_compiled_grammars_and_none_drives_out_anothers(compiled: list[str]) -> None:
    made = grammars()
    made(CITY, frozenset(), b"modest")
    for number in range(2 * MAX_COMPILED):
        made(Grammar("regex", f"a{number}"), frozenset(), b"greedy")
    before = len(compiled)
    made(CITY, frozenset(), b"modest")
    assert len(compiled) == before, "the grammar of the tenant with few of them was forgotten"
    made(Grammar("regex", "a0"), frozenset(), b"greedy")
    assert len(compiled) == before + 1, "memory grows with the number of grammars"
    for number in range(2 * MAX_COMPILED):
        made(CITY, frozenset(), b"tenant %d" % number)
    before = len(compiled)
    made(CITY, frozenset(), b"tenant 0")
    assert len(compiled) == before + 1, "memory grows with the number of tenants"


def test_a_forced_text_is_spelled_anew_for_another_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled: Counter[str] = Counter()
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **how: spelled.update([text]) or encode(self, text, **how)
    )
    made = grammars()
    made.warm()

    def answered(salt: bytes) -> Counter[str]:
        spelled.clear()
        guide = made(CITY, frozenset(), salt)
        for byte in b'"Reykjavik"':
            guide.take(byte)
        return Counter(spelled)

    first = answered(b"a")
    assert sum(first.values()) > 0
    assert not answered(b"a"), "a text that is known was spelled again"
    assert answered(b"b") == first

"""What one salt stored, asked for under another."""

from __future__ import annotations

from pathlib import Path

from tests.support.hashed.remote import FakeStore
from tests.support.models.engines import Ask, serve, tokens
from tests.support.models.identities import (
    CACHED,
)
from tests.support.tiers.disk_tier import DISK_BYTES, disk_engine
from tests.support.tiers.disk_tier import save_all as save_to_disk
from tests.support.tiers.remote_tier import PROMPT as HASHED_PROMPT
from tests.support.tiers.remote_tier import finish, remote_engine, save_all
from tests.support.transfer.engine_pairs import plain_pair
from weft.cli.main import main

SALT = b"a" * 32


def check_salts_on_disk(folder: Path) -> None:
    """A longer salt that begins with another one finds nothing of it, on disk and in prefix files."""
    prompt, one, two, out = tokens(300, 1), folder / "one", folder / "two", folder / "prefix"
    engine = disk_engine("falcon_h1", one)
    serve(engine, [Ask(prompt, salt=SALT)])
    save_to_disk(engine)
    key = max(engine.ledger.tiers.links[0].upper.trie.nodes.values(), key=lambda node: node.depth).key
    engine.close()
    assert main(["cache", str(one), "--prefix", key.hex()[:16], "--export-to", str(out)]) == 0
    assert main(["cache", str(two), "--import-from", str(out), "--size", str(DISK_BYTES)]) == 0
    for path in (one, two):
        engine = disk_engine("falcon_h1", path)
        loaded = [serve(engine, [Ask(prompt, salt=salt)])[0].report.loaded_tokens for salt in (SALT + b"b", SALT)]
        engine.close()
        assert loaded[0] == 0, "states of another salt were read"
        assert loaded[1] >= CACHED


def check_salts_in_a_store() -> None:
    store = FakeStore()
    one, other = remote_engine(store), remote_engine(store)
    finish(one, HASHED_PROMPT, SALT)
    save_all(one)
    loaded = [finish(other, HASHED_PROMPT, salt).loaded_tokens for salt in (SALT + b"b", SALT)]
    one.close()
    other.close()
    assert loaded == [0, 12], "states of another salt were read"


def check_salts_of_transfers() -> None:
    prompt = tokens(200, 1)
    with plain_pair("lfm2") as pair:
        pair.send(prompt, SALT)
        serve(pair.decode, [Ask(prompt, salt=SALT + b"b")])
        assert pair.arrived_tokens == 0, "states of another salt were read"
        serve(pair.decode, [Ask(prompt, salt=SALT)])
        assert pair.arrived_tokens == CACHED

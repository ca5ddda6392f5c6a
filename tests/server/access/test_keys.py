"""Keys as operators write them: lines with names and limits, files that only they can change, rereading them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.servers.asgi import Exchange, PacedEngine, application
from tests.support.servers.serving import serving
from weft.base import guarded_files
from weft.base.errors import OptionError
from weft.base.guarded_files import MAX_FILE_BYTES, lookups
from weft.server.access.auth import Keys, reread
from weft.server.access.keys import MAX_KEYS, Key, RateLimits, parse_line, read_key_file, resolve_keys
from weft.server.settings import ServerSettings
from weft.start.launch import Orders


def written(place: Path, text: str, mode: int = 0o600) -> str:
    place.write_text(text)
    place.chmod(mode)
    return str(place)


def read(path: str) -> tuple[Key, ...]:
    return read_key_file("api_key_file", path)


# lines ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("", None),
        ("   # alice sesame", None),
        ("sesame", Key("sesame")),
        ("c2VzYW1l==", Key("c2VzYW1l==")),
        ("  sesame\r", Key("sesame")),
        ("alice sesame", Key("sesame", "alice")),
        ("a.b_c-9\tsesame", Key("sesame", "a.b_c-9")),
        ("alice sesame requests_per_minute=60", Key("sesame", "alice", RateLimits(60))),
        ("alice s=1 tokens_per_minute=0 requests_per_minute=7", Key("s=1", "alice", RateLimits(7, 0))),
    ],
)
def test_a_line_is_a_key_or_a_name_a_key_and_limits(line, key):
    assert parse_line(line) == key


@pytest.mark.parametrize(
    "line",
    [
        "sesame requests_per_minute=60",
        "al/ice sesame",
        "a" * 65 + " sesame",
        "älice sesame",
        "alice sesame requests=60",
        "alice sesame requests_per_minute",
        "alice sesame requests_per_minute=-1",
        "alice sesame requests_per_minute=1.5",
        "alice sesame requests_per_minute=²",
        "alice sesame requests_per_minute=1000000001",
        "alice sesame requests_per_minute=" + "9" * 5000,
        "alice sesame requests_per_minute=1 requests_per_minute=2",
        "alice sesame # comments have lines of their own",
        "alice s\x7fsame",
        "alice " + "sesame" * 100,
    ],
)
def test_a_line_that_makes_no_sense_is_refused_by_its_number_and_not_shown(tmp_path, line):
    path = written(tmp_path / "keys", f"# keys\n{line}\n")
    with pytest.raises(OptionError, match="line 2: ") as raised:
        read(path)
    assert not any(word in str(raised.value).removeprefix(f"api_key_file {path}") for word in ("sesame", "al/ice", "ä"))


def test_names_and_keys_are_unique_and_unnamed_keys_are_called_by_their_place():
    found = resolve_keys(("one", Key("two", "bob"), "three"), "root", RateLimits(60))
    assert [(key.name, key.admin) for key in found] == [
        ("key-1", False),
        ("bob", False),
        ("key-3", False),
        ("admin", True),
    ]
    assert [key.rates for key in found] == [RateLimits(60)] * 3 + [RateLimits()]
    for keys in (("one", "one"), (Key("one", "bob"), Key("two", "bob")), (Key("one", "key-2"), "two")):
        with pytest.raises(OptionError, match="api_keys has"):
            resolve_keys(keys, None, RateLimits())
    with pytest.raises(OptionError, match="named admin"):
        resolve_keys((Key("one", "admin"),), "root", RateLimits())
    with pytest.raises(OptionError, match=f"at most {MAX_KEYS}"):
        resolve_keys([f"k{number}" for number in range(MAX_KEYS + 1)], None, RateLimits())


def test_a_single_key_is_its_own_admin_and_an_api_key_can_be_the_admins():
    assert [key.admin for key in resolve_keys(("one",), None, RateLimits())] == [True]
    assert [key.admin for key in resolve_keys(("one", "two"), None, RateLimits())] == [False, False]
    found = resolve_keys((Key("one", "alice"), "two"), Key("one", "root"), RateLimits())
    assert [(key.name, key.admin) for key in found] == [("alice", True), ("key-2", False)]


# files ----------------------------------------------------------------------------------------------------------------


def test_a_file_that_others_can_write_is_refused(tmp_path):
    for mode in (0o620, 0o602, 0o660, 0o666):
        with pytest.raises(OptionError, match="can write to it; run chmod 600"):
            read(written(tmp_path / "keys", "sesame", mode))
    assert read(written(tmp_path / "keys", "sesame", 0o600)) == (Key("sesame"),)


def test_a_file_that_others_can_read_is_warned_of(tmp_path, caplog):
    for mode in (0o644, 0o604, 0o640):
        caplog.clear()
        assert read(written(tmp_path / "keys", "sesame", mode)) == (Key("sesame"),)
        [warning] = caplog.messages
        assert "other users can read the key file" in warning
        assert "sesame" not in warning
    caplog.clear()
    for mode in (0o600, 0o400):
        read(written(tmp_path / "keys", "sesame", mode))
    assert caplog.messages == []


def test_a_file_of_roots_may_be_shared_with_the_server_by_its_group():
    state = os.stat_result((0o100640, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert not guarded_files.others_can_read(state)
        assert not guarded_files.others_can_write(state)
        # But one of another user is that user's to change.
        assert guarded_files.others_can_write(os.stat_result((0o100400, 0, 0, 1, 1001, 0, 0, 0, 0, 0)))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
@pytest.mark.parametrize("above", [False, True])
def test_a_file_in_a_directory_that_others_can_write_is_refused(tmp_path, mode, above):
    """Also further up: who can rename a directory can put another in its place."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    path = written(folder / "keys", "sesame")
    loose = folder.parent if above else folder
    loose.chmod(mode)
    with pytest.raises(OptionError, match=f"can change {loose}$"):
        read(path)
    # In a sticky one, as /tmp is, only owners remove their files.
    loose.chmod(mode | 0o1000)
    assert read(path) == (Key("sesame"),)


def test_links_are_followed_and_every_place_on_the_way_is_checked(tmp_path):
    safe, loose = tmp_path / "safe", tmp_path / "loose"
    for folder in (safe, loose):
        folder.mkdir()
    written(safe / "keys", "sesame")
    (loose / "link").symlink_to("../safe/keys")
    (tmp_path / "entry").symlink_to(loose / "link")
    visited = list(lookups(tmp_path / "entry"))
    assert {tmp_path / "entry", loose, loose / "link", safe} <= set(visited)
    assert read(str(tmp_path / "entry")) == (Key("sesame"),)
    loose.chmod(0o777)
    with pytest.raises(OptionError, match=f"can change {loose}$"):
        read(str(tmp_path / "entry"))
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OptionError, match="too many symbolic links"):
        read(str(tmp_path / "circle"))


def test_a_file_must_be_a_short_text_with_keys(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "latin").write_bytes(b"s\xe9same")
    (tmp_path / "latin").chmod(0o600)
    for path, why in (
        (written(tmp_path / "none", "# nothing\n\n"), "has no key"),
        (written(tmp_path / "long", "x" * (MAX_FILE_BYTES + 1)), "at most 1048576 bytes"),
        (str(tmp_path / "pipe"), "must be a regular file"),
        (str(tmp_path), ": Is a directory"),
        (str(tmp_path / "latin"), "cannot read"),
        (str(tmp_path / "missing"), ": No such file"),
    ):
        with pytest.raises(OptionError, match=why):
            read(path)


# rereading ------------------------------------------------------------------------------------------------------------


def tenant(keys: Keys, key: str):
    return keys.tenant([(b"x-api-key", key.encode())])


def settings(*keys: str | Key, admin: str | None = None) -> ServerSettings:
    return ServerSettings(api_keys=keys, admin_key=admin)


def test_a_salt_comes_from_the_key_alone():
    plain = tenant(Keys(settings("one", "two")), "one")
    other = tenant(Keys(settings("zero", Key("one", "alice", RateLimits(5, 6)), admin="one")), "one")
    assert plain.salt == other.salt != tenant(Keys(settings("one", "two")), "two").salt
    assert plain == other, "the same tenant, by whatever name"
    assert (plain.admin, other.admin) == (False, True)


def test_keys_that_are_reread_replace_all_others_and_keep_their_accounts(caplog):
    caplog.set_level("INFO")
    keys = Keys(settings(Key("one", "alice", RateLimits(2)), Key("two", "bob")))
    alice = tenant(keys, "one")
    alice.account.take_request()
    reread(keys, lambda: settings(Key("one", "anna", RateLimits(3)), Key("three", "carol")))
    assert [each.name for each in keys.tenants] == ["anna", "carol"]
    assert tenant(keys, "two") is None
    anna = tenant(keys, "one")
    assert anna == alice
    assert anna.account is alice.account
    assert dict(anna.account.headers())[b"x-ratelimit-remaining-requests"] == b"2"
    assert caplog.messages == ["reloaded the keys: 2 in all, added: anna, carol, removed: alice, bob"]


def test_a_file_that_has_become_bad_leaves_the_old_keys(tmp_path, caplog):
    path = written(tmp_path / "keys", "alice one\nbob two\n")
    keys = Keys(ServerSettings(api_keys=read(path)))
    before = keys.tenants
    for text, mode in (("alice one\nbob one\n", 0o600), ("alice one x=1\n", 0o600), ("", 0o600), ("eve three", 0o666)):
        caplog.clear()
        written(Path(path), text, mode)
        reread(keys, lambda: ServerSettings(api_keys=read(path)))
        assert all(old is new for old, new in zip(before, keys.tenants, strict=True))
        [message] = caplog.messages
        assert message.startswith("keys not reloaded, keeping the old ones: ")
    Path(path).unlink()
    reread(keys, lambda: ServerSettings(api_keys=read(path)))
    assert tenant(keys, "two").name == "bob"


def test_running_streams_go_on_without_their_key_and_the_next_request_is_refused():
    engine = PacedEngine()
    chosen = settings(Key("one", "alice"), Key("two", "bob"))
    body = {"prompt": [1, 2], "max_tokens": 20, "ignore_eos": True, "stream": True}

    async def ask() -> None:
        keys = Keys(chosen)
        async with application(chosen, engine, keys=keys) as app:
            asked = Exchange(app, "/v1/completions", body, "two")
            running = asked.start()
            engine.allow(1)
            await asked.until(b"data: {")
            reread(keys, lambda: settings(Key("one", "alice")))
            assert (await Exchange(app, "/v1/models", key="two").answer()).status == 401
            assert (await Exchange(app, "/v1/models", key="one").answer()).status == 200
            engine.free()
            await running
            assert asked.body.count(b"data: {") > 1
            assert asked.body.endswith(b"data: [DONE]\n\n")
            assert b"error" not in asked.body

    asyncio.run(ask())


@pytest.fixture
def _hangups_as_ever():
    """The default for SIGHUP, also where the tests were started so that they outlive their terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangups_as_ever")
def test_a_hangup_reads_the_keys_again_only_where_there_is_a_file():
    # Tests that run in the background may have been started with the signal ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    async def hang_up() -> None:
        heard = asyncio.Event()
        Orders().on_hangup(heard.set)
        assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL, "the signal would end the tests"
        os.kill(os.getpid(), signal.SIGHUP)
        await heard.wait()

    asyncio.run(hang_up())
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL

    async def installed() -> None:
        Orders()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL

    asyncio.run(installed())


@pytest.mark.thorough
def test_a_server_rereads_its_key_files_when_it_is_hung_up(tmp_path):
    path = written(tmp_path / "keys", "alice one\nbob two\n")
    admin = written(tmp_path / "admin", "root three\n")
    with serving("--api-key-file", path, "--admin-key-file", admin) as served:

        def hang_up(expected: str) -> None:
            served.process.send_signal(signal.SIGHUP)
            served.wait_for(expected)

        assert [served.call("/v1/models", key=key)[0] for key in ("one", "two", "four")] == [200, 200, 401]
        assert [served.call("/metrics", key=key)[0] for key in ("one", "three")] == [403, 200]
        written(Path(path), "alice one\ncarol four\n")
        written(Path(admin), "five\n")
        hang_up("reloaded the keys: 3 in all, added: admin, carol, removed: bob, root")
        assert [served.call("/v1/models", key=key)[0] for key in ("one", "two", "four")] == [200, 401, 200]
        assert [served.call("/metrics", key=key)[0] for key in ("three", "five")] == [401, 200]
        written(Path(path), "eve six extra\n")
        hang_up("keys not reloaded, keeping the old ones: api_key_file")
        assert [served.call("/v1/models", key=key)[0] for key in ("one", "six")] == [200, 401]
        # Service managers signal all processes; the engine has nothing to read, and does not end of it.
        os.kill(served.children[0], signal.SIGHUP)
        assert served.call("/health_generate", key="one")[0] == 200
        assert served.stop() == 0
        told = served.errors.read_text()
    assert "key=alice" in told
    assert "key=carol" in told
    assert "Traceback" not in told

"""The page's files: sent without a key, allowed to load nothing but each other, and the libraries as published."""

from __future__ import annotations

import gzip
import hashlib
import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from tests.support.servers.http_server import Served, serving
from weft.server import page
from weft.server.page import FILES, PAGE_ROUTES
from weft.server.settings import ServerSettings

FOLDER = Path(str(files(page.__name__).joinpath("files")))
OWN = sorted(name for name in FILES.values() if not name.startswith("vendor/"))
SCRIPTS = [name for name in OWN if name.endswith(".js")]
# Bytes of all files together, compressed: what a first visit loads.
MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def locked():
    with serving(ServerSettings(api_keys=("first-key", "second-key"), admin_key="admin-key")) as served:
        yield served


def test_every_file_is_sent_without_a_key_and_with_the_policy(locked: Served):
    for path in FILES:
        answer = httpx.get(locked.url + path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.content == (FOLDER / FILES[path]).read_bytes()
        again = httpx.get(locked.url + path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_other_methods_and_names_need_a_key(locked: Served):
    for method, path in (("POST", "/"), ("GET", "/page"), ("GET", "/page/none.js"), ("GET", "/page/../settings.py")):
        assert httpx.request(method, locked.url + path).status_code == 401
    assert httpx.get(locked.url + "/page/none.js", headers={"x-api-key": "first-key"}).status_code == 404


def test_a_page_that_is_turned_off_is_not_there():
    with serving(ServerSettings(api_keys=("key",), page=False)) as served:
        for _, path in PAGE_ROUTES:
            assert httpx.get(served.url + path).status_code == 401
            assert httpx.get(served.url + path, headers={"x-api-key": "key"}).status_code == 404


def test_the_list_has_every_file_and_every_import_leads_to_one():
    on_disk = {each.relative_to(FOLDER).as_posix() for each in FOLDER.rglob("*") if each.is_file()}
    assert {name for name in on_disk if not re.search(r"README|LICENSE", name)} == set(FILES.values())
    for name in SCRIPTS:
        for imported in re.findall(r'^import .* from "(.+?)";', (FOLDER / name).read_text(), re.MULTILINE):
            assert "/page/" + imported.removeprefix("./") in FILES, (name, imported)


@pytest.mark.parametrize("name", OWN)
def test_nothing_is_inline_or_from_elsewhere(name: str):
    text = (FOLDER / name).read_text()
    assert not re.search(
        r"<script(?![^>]*src=)|\son\w+=[\"']|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text
    )
    assert not re.search(r"\beval\(|new Function|dangerouslySet|javascript:|document\.cookie|sessionStorage", text)
    addresses = re.findall(r"https?://[\w./$-]+", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, addresses


def test_the_key_is_kept_nowhere_but_in_a_variable():
    stored = [name for name in SCRIPTS if "localStorage" in (FOLDER / name).read_text()]
    assert stored == ["conversations.js"]
    assert "key" not in re.findall(r"localStorage\.setItem\((.+)\)", (FOLDER / "conversations.js").read_text())[0]


def test_libraries_are_those_that_were_published():
    rows = re.findall(r"^\| `(\S+)` \|.*\| (\w{64}) \|$", (FOLDER / "vendor" / "README.md").read_text(), re.MULTILINE)
    assert {f"vendor/{name}" for name, _ in rows} == {name for name in FILES.values() if name.startswith("vendor/")}
    for name, digest in rows:
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest


def test_a_first_visit_loads_little():
    assert sum(len(gzip.compress((FOLDER / name).read_bytes(), 9)) for name in FILES.values()) <= MOST_BYTES


# the outline ----------------------------------------------------------------------------------------------------------


def outline(served: Served, key: str) -> dict:
    answer = httpx.get(served.url + "/cache/outline", headers={"x-api-key": key})
    assert answer.status_code == 200
    return answer.json()


def test_a_key_sees_its_own_branches_only(locked: Served):
    for key, text in (("first-key", "warp " * 90), ("second-key", "weft " * 90)):
        body = {"prompt": text, "max_tokens": 1}
        answer = httpx.post(locked.url + "/v1/completions", json=body, headers={"x-api-key": key}, timeout=60)
        assert answer.status_code == 200
    every = outline(locked, "admin-key")
    own = [outline(locked, key) for key in ("first-key", "second-key")]
    assert all(each.keys() == {"cell_tokens", "branches"} for each in own)
    names = [{branch["name"] for branch in each["branches"]} for each in own]
    assert all(names)
    assert names[0].isdisjoint(names[1])
    assert names[0] | names[1] == {branch["name"] for branch in every["branches"]}
    assert {branch["tenant"] for branch in own[0]["branches"]} != {branch["tenant"] for branch in own[1]["branches"]}
    assert httpx.get(locked.url + "/cache/outline").status_code == 401

"""Keys, tenants, bounds, malformed bodies, strangers' web pages: nothing gets further than it may. Tiny model."""

from __future__ import annotations

import hmac
import json

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings

from tests.support.servers.http_server import Served, raw, serving
from tests.support.servers.http_values import LIMITS
from weft.server.access import auth
from weft.server.access.auth import Keys
from weft.server.access.guard import OPEN_ROUTES
from weft.server.apis.openapi import OPERATIONS
from weft.server.app import ROUTES
from weft.server.settings import ServerSettings

LONG = "The quick brown fox jumps over the lazy dog. " * 6
PATHS = sorted({path for path, _, _ in ROUTES} | {path for path, *_ in OPERATIONS} | {"/openapi.json", "/nowhere"})


@pytest.fixture(scope="module")
def open_server():
    with serving(ServerSettings(limits=LIMITS), max_sequences=8) as server:
        yield server


@pytest.fixture(scope="module")
def locked():
    settings = ServerSettings(api_keys=("first-key", "second-key"), admin_key="admin-key", limits=LIMITS)
    with serving(settings, max_sequences=8) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_only_the_open_routes_answer_without_a_key(locked: Served, path, method):
    for header in ("", "Bearer wrong", "Basic first-key", "Bearer first-key2", "first-key"):
        answer = locked.client.request(method, path, headers={"authorization": header})
        if (method, path) in OPEN_ROUTES:
            assert (answer.status_code, answer.content) == (200, b'{"status":"ok"}')
        else:
            assert answer.status_code == 401, (path, header)
            error = answer.json()["error"]
            # Ollama's errors are texts.
            assert "API key" in (error if isinstance(error, str) else error["message"])
            assert isinstance(error, str) or error["type"] == "authentication_error"


def test_health_is_open_unless_configured_otherwise():
    pings = (("GET", "/ping"), ("HEAD", "/ping"), ("POST", "/ping"))
    assert (("GET", "/health"), ("HEAD", "/health"), *pings) == OPEN_ROUTES
    with serving(ServerSettings(api_keys=("k",))) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.head(server.url + "/health").status_code == 200
        assert httpx.post(server.url + "/health").status_code == 401
        assert httpx.post(server.url + "/ping").content == httpx.get(server.url + "/ping").content == b'{"status":"ok"}'
        for path in ("/health_generate", "/metrics", "/v1/models", "/health/"):
            assert httpx.get(server.url + path).status_code == 401
    with serving(ServerSettings(api_keys=("k",), open_health=False)) as server:
        assert httpx.get(server.url + "/health").status_code == 401
        assert httpx.post(server.url + "/ping").status_code == 401
        assert server.client.get("/health").status_code == 200


def test_any_of_the_keys_opens_by_either_header(locked: Served):
    for headers in (bearer("first-key"), bearer("second-key"), {"x-api-key": "second-key"}, bearer("admin-key")):
        assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 200


def test_what_concerns_all_needs_the_admin(locked: Served):
    for method, path in (("GET", "/metrics"), ("GET", "/cache"), ("GET", "/server_info"), ("POST", "/flush_cache")):
        assert locked.client.request(method, path, headers=bearer("first-key")).status_code == 403
        assert locked.client.request(method, path, headers=bearer("admin-key")).status_code == 200


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch):
    compared, really = [], hmac.compare_digest

    def watched(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return really(left, right)

    monkeypatch.setattr(auth.hmac, "compare_digest", watched)
    keys = Keys(ServerSettings(api_keys=("one", "two", "three")))
    for presented in (b"one", b"three", b"wrong", b""):
        compared.clear()
        keys.tenant([(b"authorization", b"Bearer " + presented)])
        assert len(compared) == 3
        assert {len(each) for pair in compared for each in pair} == {32}


def test_keys_are_shown_nowhere():
    settings = ServerSettings(api_keys=("sesame",), admin_key="sesame2")
    assert "sesame" not in repr(settings)


# tenants --------------------------------------------------------------------------------------------------------------


def cached(server: Served, key: str, prompt: str, salt: str | None = None) -> tuple[int, str]:
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
    answer = server.client.post("/v1/completions", json=body, headers=bearer(key)).json()
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], details["miss"]["reason"]


def test_tenants_neither_hit_nor_see_each_others_prefixes(locked: Served):
    prompt = "tenants " + LONG
    assert cached(locked, "first-key", prompt) == (0, "never_computed")
    assert cached(locked, "first-key", prompt)[0] > 0
    # Not even the reason tells that somebody else has sent it.
    assert cached(locked, "second-key", prompt) == (0, "never_computed")
    assert cached(locked, "second-key", prompt)[0] > 0
    assert cached(locked, "second-key", prompt, "salt") == (0, "never_computed")


def test_a_salt_cannot_imitate_another_tenants():
    keys = Keys(ServerSettings(api_keys=("one", "two")))
    one, two = (keys.tenant([(b"x-api-key", key)]) for key in (b"one", b"two"))
    assert one.salt != two.salt
    assert len(one.salt) == len(two.salt) == 32
    assert one.salted("x") != two.salted("x")


def test_tenants_cannot_abort_each_other(locked: Served):
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with locked.client.stream("POST", "/v1/completions", json=body, headers=bearer("first-key")) as answer:
        lines = answer.iter_lines()
        name = json.loads(next(lines)[6:])["id"]
        for rid in ({"rid": name}, {"abort_all": True}):
            other = locked.client.post("/abort_request", json=rid, headers=bearer("second-key"))
            assert other.json() == {"aborted": 0}
        assert '"length"' in "".join(lines)


# browsers -------------------------------------------------------------------------------------------------------------


def test_pages_of_other_origins_are_refused(open_server: Served):
    there = {"origin": "https://evil.example"}
    assert open_server.client.get("/v1/models", headers=there).status_code == 403
    same = {"origin": open_server.url}
    assert open_server.client.get("/v1/models", headers=same).status_code == 200


def test_allowed_origins_and_trusted_hosts():
    settings = ServerSettings(cors_origins=("https://good.example",), trusted_hosts=("127.0.0.1", "localhost"))
    with serving(settings) as server:
        good = server.client.get("/v1/models", headers={"origin": "https://good.example"})
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        assert server.client.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
        asked = {"origin": "https://good.example", "access-control-request-method": "POST"}
        assert server.client.options("/v1/completions", headers=asked).status_code == 200
        assert server.client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert server.client.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200
        # Probes of balancers have none; pages in a browser always do.
        assert raw(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


# the document ---------------------------------------------------------------------------------------------------------


def test_the_document_knows_all_routes(open_server: Served):
    document = open_server.client.get("/openapi.json").json()
    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    older = {"/get_server_info", "/get_model_info", "/v1/models/{name:path}", "/api/v0/models/{name:path}"}
    assert {(path.replace(":path", ""), method) for path, method, _ in ROUTES if path not in older} <= told


@pytest.mark.thorough
def test_no_body_that_fits_the_document_breaks_the_server(open_server: Served):
    """A bounded run of schemathesis: whatever it makes up of the document gets a 2xx or a 4xx."""
    # Its import takes seconds.
    import schemathesis

    schema = schemathesis.openapi.from_dict(open_server.client.get("/openapi.json").json())
    # See `tests.support.texts`.
    schema.config.generation.codec = None
    tried = []
    bounded = hypothesis_settings(
        max_examples=3,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.body:

            @bounded
            @given(case=operation.as_strategy())
            def check(case: schemathesis.Case) -> None:
                answer = open_server.client.post(case.path, content=json.dumps(case.body).encode())
                tried.append(answer.status_code)
                assert answer.status_code < 500, answer.text

            check()
    assert len(tried) > 50
    assert 200 in tried

"""One browser, and one server of the tiny model, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import Watched, chromium, missing
from tests.support.servers.http_server import Served, serving
from weft.server.settings import ServerSettings


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if lacking := missing():
        pytest.skip(f"{', '.join(lacking)} missing")
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ServerSettings(trusted_hosts=())) as found:
        yield found


@pytest.fixture
def watched(browser: Any, served: Served) -> Iterator[Watched]:
    found = Watched(browser, served.url)
    found.open()
    yield found
    found.close()

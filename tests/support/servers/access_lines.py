"""Lines of the access log, read field by field."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from weft.server.access.keys import Key
from weft.server.settings import ServerSettings

NAMED = ServerSettings(api_keys=(Key("sesame", "alice"), Key("secret", "bob")), admin_key="root-key")
FIELDS = ["id", "key", "client", "method", "route", "status", "tokens_in", "tokens_cached", "tokens_out", "queue_ms"]
FIELDS += ["first_token_ms", "total_ms", "end"]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "weft.access"]


def shown(caplog: pytest.LogCaptureFixture, formatter: logging.Formatter) -> str:
    """All of the log, as it would be written."""
    return "".join(formatter.format(record) + "\n" for record in caplog.records)

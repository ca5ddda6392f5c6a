"""One format for all log lines of all processes: text or JSON, with a time, one line each.

Python's warnings, uncaught exceptions and the lines of libraries such as uvicorn are logged in the same format.

External text cannot forge a line or a field of one: control characters are escaped, values that are not plain are
quoted, and the lines of a traceback are indented.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import warnings
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# Control characters, line separators and surrogates, none of which may reach a terminal or file.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# A value that stands in a line without quotes: printable ASCII, but no space, which would begin another field.
_PLAIN = re.compile(r"[!#-&(-<>-~]+")


def set_up_logging(level: int | str, format: str) -> None:
    """Log to standard error from now on, unless an embedding program has set up its own handlers."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    warnings.formatwarning = _warning_line
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{category.__name__}: {message} ({filename}:{lineno})"


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, thread: str = "the process"
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("weft").critical("%s ends by an uncaught exception", thread, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
    name = "a thread" if found.thread is None else f"thread {found.thread.name}"
    if found.exc_value is not None and not issubclass(found.exc_type, SystemExit):
        _log_uncaught(found.exc_type, found.exc_value, found.exc_traceback, name)


def log_fields(log: logging.Logger, message: str, fields: dict[str, Any]) -> None:
    """Log a message with named values, which both formats keep separate."""
    if log.isEnabledFor(logging.INFO):
        # Built by hand: logging would look up the calling line of code for every request.
        log.handle(log.makeRecord(log.name, logging.INFO, "", 0, message, (), None, extra={"fields": fields}))


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO weft.access: request id=... status=200`, then an indented traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        named = "".join(f" {name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{named}"
        return "\n  ".join(map(escaped, [line, *_traceback(self, record)]))


class JsonLines(logging.Formatter):
    """One JSON object per line, with a traceback under `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        found = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        found |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        traceback = _traceback(self, record)
        if traceback:
            found["traceback"] = "\n".join(traceback)
        return json.dumps(found, default=str)


def escaped(text: str) -> str:
    r"""
    >>> escaped("a\nb\x1b[31m")
    'a\\x0ab\\x1b[31m'
    """
    return _UNSAFE.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _shown(value: Any) -> str:
    """
    >>> _shown(None), _shown("10.0.0.1"), _shown("x status=200")
    ('-', '10.0.0.1', '"x status=200"')
    """
    text = "-" if value is None else str(value)
    return text if is_plain(text) else json.dumps(text)


def is_plain(text: str) -> bool:
    """Return whether a text is one word that a line may show without quotes."""
    return _PLAIN.fullmatch(text) is not None


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    # Split only here: other line ends are external text and are escaped.
    found = [formatter.formatException(record.exc_info)] if record.exc_info else []
    found += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return [line for part in found for line in part.split("\n")]

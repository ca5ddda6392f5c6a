"""Downloads from the hub, or from its local cache where that has everything.

`huggingface_hub` resumes downloads and reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. This module adds one
line for each way in which that fails. It is imported late: it takes a tenth of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from weft.base.errors import ModelError

T = TypeVar("T")
MOST_SHOWN = 200


def snapshot(repository: str, patterns: Sequence[str], hint: str = "") -> Path:
    """Return the local folder of a repository, with the files of these patterns. `hint`: what may have been meant."""
    from huggingface_hub import snapshot_download

    return attempted(repository, lambda: Path(snapshot_download(repository, allow_patterns=list(patterns))), hint)


def file_names(repository: str) -> list[str]:
    """Return the files of a repository; offline, those in the cache."""
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    def found() -> list[str]:
        try:
            return list_repo_files(repository)
        except unreachable(OfflineModeIsEnabled):
            # No pattern: whatever is there counts, and need not be all.
            folder = Path(snapshot_download(repository, allow_patterns=[], local_files_only=True))
            return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]

    return attempted(repository, found)


def attempted(repository: str, work: Callable[[], T], hint: str = "") -> T:
    """Return what `work` returns, or raise in one line why the hub did not provide it."""
    from huggingface_hub import errors

    try:
        return work()
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repository} has terms to accept; accept them at {endpoint()}/{repository}, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{repository} is neither a local folder nor a model at {endpoint()}; a private one needs HF_TOKEN{hint}"
        ) from error
    except unreachable(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            f"{repository} is neither a local folder nor in the cache, and the hub at {endpoint()} cannot be reached"
            f"{why_unreachable(error)}"
        ) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"the download of {repository} from {endpoint()} failed: {first_line(error)}") from error


def unreachable(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of connections that could not be made or broke, and these."""
    # The library's HTTP client depends on its version.
    clients = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return (*more, ConnectionError, *(client.TransportError for client in clients))


def why_unreachable(error: BaseException) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return ": HF_HUB_OFFLINE is set; unset it, or pass a folder"
    return (
        f" ({first_line(error.__cause__ or error)}); check the network, HF_ENDPOINT and HTTPS_PROXY, or pass a folder"
    )


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:MOST_SHOWN]}" if lines else type(error).__name__

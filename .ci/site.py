"""Hook of MkDocs: links from pages to files outside of docs/ become the names of these files."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = PurePosixPath(page.file.src_uri).parent

    def inside(link: re.Match[str]) -> str:
        target = link[2]
        outside = "://" not in target and os.path.normpath(folder / target.partition("#")[0]).startswith("..")
        return link[1] if outside else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", inside, markdown)

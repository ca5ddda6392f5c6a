"""Folders of tokenizers and templates."""

from __future__ import annotations

import json

from tests.support.models import tiny_model

BYTES = tiny_model.tokenizer()


def folder_with(tmp_path, **files):
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return tmp_path

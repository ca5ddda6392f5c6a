"""Drafts verified on a CPU, and the rows that follow them."""

from __future__ import annotations

from weft.kernels.plain.following import move_rows, verify_drafts

__all__ = ["move_rows", "verify_drafts"]

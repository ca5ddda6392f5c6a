"""Random texts for Hypothesis: any characters that UTF-8 encodes.

Its own default asks the codec about every character there is, which takes ten seconds in a fresh checkout.
"""

from __future__ import annotations

from hypothesis import strategies as st

CHARACTERS = st.characters(exclude_categories=["Cs"])


def texts(max_size: int | None = None) -> st.SearchStrategy[str]:
    return st.text(CHARACTERS, max_size=max_size)

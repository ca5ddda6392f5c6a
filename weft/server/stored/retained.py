"""Notes what requests retain, by their ids, so that it can be forked or sent as a file until the retention ends."""

from __future__ import annotations

import time

from weft.base.tenants import tenant_digest
from weft.server.generation import Generation
from weft.server.stored.answers import StoredAnswer, StoredAnswers, as_bytes

# Of all that is noted: tokens take four bytes each.
RETAINED_BYTES = 64 << 20


def note_retained(noted: StoredAnswers, generation: Generation) -> None:
    """Note the prompt and the answers of a generation that has ended, if its requests retain them."""
    ended = [each for each in generation.sequences if each.finish is not None and each.error is None]
    if not ended or not ended[0].request.retain:
        return
    request, now = ended[0].request, time.time()
    seconds = max(each.seconds for each in request.retain)
    if not seconds:
        return
    # Marks inside a prompt retain it up to there, and no answer.
    ends = [each.tokens for each in request.retain if each.seconds]
    whole = None in ends
    prompt = request.prompt if whole else request.prompt[: max(end or 0 for end in ends)]
    before = [] if request.answered is None else request.answered.tolist()
    answers = [as_bytes([*before, *each.answer.tokens]) if whole else b"" for each in ended]
    own = request.salt.removeprefix(generation.tenant.salt).decode() or None
    for name in generation.names:
        noted.add(
            StoredAnswer(
                id=name,
                tenant=tenant_digest(generation.tenant.salt),
                created=now,
                cache_salt=own,
                tokens=as_bytes(prompt),
                answers=answers,
                until=now + seconds,
            )
        )

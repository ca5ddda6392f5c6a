"""Limits and usage of a key per minute. Kept in memory; call everything from the event loop's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from weft.base.errors import RequestError
from weft.server.access.keys import RateLimits

Clock = Callable[[], float]
# Takes a number of requests, and what one of them used.
Note = Callable[[int, "Used | None"], None]
MINUTE_SECONDS = 60.0
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class RateLimited(RequestError):
    """A key has used up one of its limits. `retry_seconds` is the time until it may retry."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message, 429, code="rate_limit_exceeded")
        self.retry_seconds = max(1, math.ceil(retry_seconds))


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens of a request: of its prompts, how many of them were cached, and of its answers."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    @property
    def charged(self) -> int:
        """Tokens that count against a limit; cached ones cost next to nothing and are free."""
        return self.prompt - self.cached + self.generated


class Bucket:
    """A token bucket: holds a minute's worth and refills evenly. Its balance is negative after an overdraft.

    >>> now = [0.0]
    >>> bucket = Bucket(60, lambda: now[0])
    >>> bucket.take(60); now[0] += 2.5
    >>> bucket.balance, bucket.wait_seconds(4)
    (2.5, 1.5)
    """

    __slots__ = ("_balance", "_clock", "_updated", "per_minute")

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._balance = float(per_minute)
        self._clock = clock
        self._updated = clock()

    @property
    def balance(self) -> float:
        now = self._clock()
        gained = (now - self._updated) * self.per_minute / MINUTE_SECONDS
        self._balance = min(float(self.per_minute), self._balance + gained)
        self._updated = now
        return self._balance

    def wait_seconds(self, amount: float) -> float:
        """Return the time until the balance covers an amount; 0 if it already does."""
        return max(0.0, amount - self.balance) * MINUTE_SECONDS / self.per_minute

    def take(self, amount: float) -> None:
        """Take an amount, or return a negative one."""
        self._balance = min(float(self.per_minute), self.balance - amount)

    def resize(self, per_minute: int) -> None:
        """Change the limit. Usage stays."""
        used = self.per_minute - self.balance
        self.per_minute = per_minute
        self._balance = per_minute - used


class Account:
    """Limits and usage of one key. Survives a reload of the keys, whatever its name and limits become.

    Tokens are reserved before a request runs, for its prompt and for everything that it may generate; the unused part
    is returned when it ends. So only an answer of more than a minute's worth can overdraw a limit.
    """

    def __init__(
        self,
        rates: RateLimits | None = None,
        clock: Clock = time.monotonic,
        note: Note = lambda requests, used: None,
    ) -> None:
        self._clock = clock
        self._note = note
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.requests = 0
        self.limited = {"requests": 0, "tokens": 0}
        self.tokens = {"prompt": 0, "cached": 0, "generated": 0}
        self.change(rates or RateLimits())

    def change(self, rates: RateLimits, note: Note | None = None) -> None:
        """Change the limits, and what counts usage if another one is given."""
        self._note = note or self._note
        self._requests = self._changed(self._requests, rates.requests_per_minute)
        self._tokens = self._changed(self._tokens, rates.tokens_per_minute)

    def _changed(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if not per_minute:
            return None
        if bucket is None:
            return Bucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket

    def count_request(self) -> None:
        self.requests += 1
        self._note(1, None)

    def take_request(self) -> None:
        """Count a request; raise if there are too many."""
        self.count_request()
        if self._requests is not None:
            self._need(self._requests, 1, "requests")
            self._requests.take(1)

    def reserve(self, prompt: int, output: int) -> int:
        """Reserve tokens and return how many; raise if not enough are left.

        A request without a bound on its answer may ask for more than a minute's worth; then a minute's worth is
        reserved.
        """
        bucket = self._tokens
        if bucket is None:
            return 0
        if prompt > bucket.per_minute:
            self.limited["tokens"] += 1
            asked = f"the prompt has {prompt} tokens, but this key may use {bucket.per_minute} a minute"
            raise RateLimited(f"{asked}; send a shorter prompt", MINUTE_SECONDS)
        amount = min(prompt + output, bucket.per_minute)
        self._need(bucket, amount, "tokens")
        bucket.take(amount)
        return amount

    def settle(self, reserved: int, used: Used) -> None:
        """Charge a request's usage instead of its reservation."""
        self.tokens["prompt"] += used.prompt
        self.tokens["cached"] += used.cached
        self.tokens["generated"] += used.generated
        self._note(0, used)
        if self._tokens is not None:
            self._tokens.take(used.charged - reserved)

    def _need(self, bucket: Bucket, amount: int, kind: str) -> None:
        wait = bucket.wait_seconds(amount)
        if wait > 0:
            self.limited[kind] += 1
            left = max(0, math.floor(bucket.balance))
            state = f"{bucket.per_minute} {kind} a minute, {left} left, {amount} needed"
            raise RateLimited(f"this key has reached its rate limit: {state}; try again in {wait:.1f} s", wait)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the state of the limits, in the headers of OpenAI's API."""
        found = []
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                left, reset = max(0, math.floor(bucket.balance)), bucket.wait_seconds(bucket.per_minute)
                found += [
                    (f"x-ratelimit-limit-{kind}".encode(), str(bucket.per_minute).encode()),
                    (f"x-ratelimit-remaining-{kind}".encode(), str(left).encode()),
                    (f"x-ratelimit-reset-{kind}".encode(), f"{reset:.3f}s".encode()),
                ]
        return found

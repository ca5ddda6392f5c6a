"""Grammars for answers: JSON schemas, regular expressions, choices and Lark, compiled into masks over the vocabulary.

Built on llguidance. `grammar_source.py` bounds all input, and compiling and matching have their own budgets: a grammar
that is too large or too ambiguous is an error of its request only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, partial
from threading import Lock, local
from time import thread_time
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.base.tenants import KEY_SALT_BYTES
from weft.text.grammar_source import FIELDS, MAX_PROPERTIES, first_words, source_of
from weft.text.tokenizer import Tokenizer

# Compiled grammars kept for later requests; forced texts whose tokens are kept, and the most characters of one.
MAX_COMPILED, MOST_SPELLED, LONGEST_SPELLED = 32, 4096, 64
# Processor time that looking ahead of an answer may take in a step. Masks of an ambiguous grammar take longer and
# longer, and all other answers wait for them.
LOOK_AHEAD_SECONDS = 0.01
# Processor time for the masks of all answers of a grammar, and of all of a tenant: what may be spent at first and kept
# for later, and what each token adds. Masks of `a: a a | "x"` take time that grows with the square of the answer's
# length. Schemas take 0.1 ms on average.
GRAMMAR_SECONDS, TENANT_SECONDS = 2.0, 8.0
TOKEN_SECONDS = 0.005
# Masks that take longer on average are not found between two steps; the weight of a new mask in the average.
SLOW_SECONDS, NEW_WEIGHT = 0.002, 0.25

# A lexer state takes one or two kB; a step's budgets are tens of milliseconds at worst, compiling takes seconds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    # Four for each optional property of an object, and as many again for what surrounds it.
    max_items_in_row=8 * MAX_PROPERTIES,
    verbose_errors=False,
)


Clock = Callable[[], float]


class MaskBudget:
    """Processor time for the masks of several answers, which any thread may spend.

    It is kept while one of them runs, and full again when all have ended.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most = self._left = most_seconds
        self._average = 0.0
        self._lock = Lock()

    @property
    def slow(self) -> bool:
        """Whether the last masks took long, whichever answer they were for."""
        return self._average > SLOW_SECONDS

    def spend(self, seconds: float) -> bool:
        """Pay for a mask; return whether its answer may go on. One that spends less than a token adds always may."""
        with self._lock:
            self._left = min(self._most, self._left + TOKEN_SECONDS - seconds)
            self._average += NEW_WEIGHT * (seconds - self._average)
            return self._left >= 0 or seconds <= TOKEN_SECONDS


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe.

    `vocab_size` is the model's: ids beyond the tokenizer's are never allowed. `clock` measures the processor time of
    the thread that reads it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, clock: Clock | None = None) -> None:
        self._vocab_size = vocab_size
        self._words = Words(tokenizer, vocab_size)
        self._clock = clock or thread_time
        self._trie: LLTokenizer | None = None
        # By salt: how long compiling takes must not tell one tenant what another one uses.
        self._compiled: OrderedDict[tuple[bytes, Grammar], LLMatcher] = OrderedDict()
        # By tenant and grammar, and by tenant: a `cache_salt` is the client's own choice, and gives it no more time.
        self._budgets: WeakValueDictionary[tuple[bytes, Grammar | None], MaskBudget] = WeakValueDictionary()
        self._lock = Lock()
        self._trie_lock = Lock()

    def __call__(self, grammar: Grammar, stop_tokens: frozenset[int] = frozenset(), salt: bytes = b"") -> Guide:
        """Return the start of an answer that follows the grammar. Raises `RequestError` if no answer can."""
        matcher = self.compile(grammar, salt).deep_copy()
        tenant, field = salt[:KEY_SALT_BYTES], FIELDS[grammar.kind]
        with self._lock:
            own = self._budgets.setdefault((tenant, grammar), MaskBudget(GRAMMAR_SECONDS))
            all_of_tenant = self._budgets.setdefault((tenant, None), MaskBudget(TENANT_SECONDS))
        enter = partial(self._words.spell_for, salt)
        guide = Guide(matcher, self._vocab_size, stop_tokens, field, enter, (own, all_of_tenant), self._clock)
        if guide.ended:
            raise InvalidField(FIELDS[grammar.kind], "allows only an empty answer")
        return guide

    def compile(self, grammar: Grammar, salt: bytes = b"") -> LLMatcher:
        """Compile a grammar ahead of a call. Raises `RequestError` if it is invalid."""
        key = salt, grammar
        found = self._compiled.get(key)
        if found is None:
            # Outside the lock: a request with a compiled grammar does not wait for another one's compilation.
            source = source_of(grammar) if grammar.source is None else grammar.source
            # The library releases the interpreter lock, so the engine's steps continue.
            trie = self._trie_of_words()
            self._words.spell_for(salt)
            found = LLMatcher(trie, source, log_level=0, limits=_LIMITS)
            if found.is_error():
                raise InvalidField(FIELDS[grammar.kind], f"cannot be used: {first_words(found.get_error())}")
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._forget_one()
        return found

    def _forget_one(self) -> None:
        """Forget the grammar that the salt with the most of them has not used for longest."""
        held = Counter(salt for salt, _ in self._compiled)
        most = max(held.values())
        del self._compiled[next(key for key in self._compiled if held[key[0]] == most)]

    def warm(self) -> None:
        """Prepare everything that the first grammar would have to wait for."""
        self._trie_of_words()

    def _trie_of_words(self) -> LLTokenizer:
        with self._trie_lock:
            if self._trie is None:
                self._words.load()
                self._trie = LLTokenizer(TokenizerWrapper(self._words))
            return self._trie


class _Look(NamedTuple):
    """What may come after a token of a look ahead, and the processor time that it took to find."""

    mask: NDArray[np.int32]
    ended: bool
    seconds: float


class Guide:
    """One answer that follows a grammar: `mask` has one bit per token, set if it may come next.

    Stop tokens are allowed only where the answer may end, whatever their text. `ended`: only stop tokens may follow.
    `enter` is called before the library is, in the thread that calls it. All `budgets` pay for the answer's masks; the
    first is that of its grammar.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        stop_tokens: frozenset[int],
        field: str,
        enter: Callable[[], None],
        budgets: tuple[MaskBudget, ...],
        clock: Clock,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field
        self._enter = enter
        self._budgets = budgets
        self._clock = clock
        self._stops = _mask_of([token for token in stop_tokens if token < vocab_size], vocab_size)
        self._not_stops = ~self._stops
        self.ended = False
        # The last look ahead: tokens, and what may come after each of them.
        self._ahead: tuple[list[int], list[_Look]] = ([], [])
        self._look_seconds = 0.0
        self.seconds = 0.0
        self.mask = self._look()

    @property
    def slow(self) -> bool:
        return self._budgets[0].slow

    def foresees(self, token: int) -> bool:
        """Return whether a look ahead has already found what may follow this token."""
        return bool(self._ahead[0]) and self._ahead[0][0] == token

    def take(self, token: int) -> None:
        """Advance by a token. Raises `RequestError` at a dead end."""
        tokens, looks = self._ahead
        foreseen = self.foresees(token)
        self._ahead = ([], [])
        if _has(self._stops, token):
            self.ended = True
        elif foreseen:
            # A draft that was accepted: what may come next was found when it was proposed.
            self._consume(token)
            self._ahead = tokens[1:], looks[1:]
            self.mask, self.ended, self._look_seconds = looks[0]
            self._pay()
        else:
            self.advance(token)
            self._pay()

    def advance(self, token: int) -> None:
        """Advance by a token that does not end the answer, and find what may follow it; no budget pays for it."""
        began = self._clock()
        try:
            self._consume(token)
            self.mask = self._look()
        finally:
            self._look_seconds = self._clock() - began
            self.seconds += self._look_seconds

    def _consume(self, token: int) -> None:
        self._enter()
        if not self._matcher.consume_token(token):
            raise InvalidField(self._field, f"has failed on the answer: {first_words(self._matcher.get_error())}")

    def _pay(self) -> None:
        paid = [budget.spend(self._look_seconds) for budget in self._budgets]
        if not all(paid) and not self.ended:
            raise InvalidField(self._field, "is too ambiguous: finding the next tokens of this answer takes too long")

    def look_ahead(self) -> Ahead:
        """Return a position that looks ahead of the answer, from here. What it finds is kept for `take`."""
        return Ahead(self)

    def masks_along(self, tokens: Sequence[int]) -> list[NDArray[np.int32]]:
        """Return the masks after each of further tokens, as far as the answer may go on and time allows.

        The position stays. Asked again for the same tokens or the first of them, it returns the same masks.
        """
        found, looks = self._ahead
        if not tokens or tuple(found[: len(tokens)]) != tuple(tokens):
            ahead = self.look_ahead()
            for token in tokens:
                if not ahead.allows(token) or not ahead.take(token):
                    break
            looks = self._ahead[1]
        return [look.mask for look in looks[: len(tokens)]]

    def _look(self) -> NDArray[np.int32]:
        self._enter()
        # The end is a token of its own, after the model's vocabulary.
        found = np.empty(self._vocab_size // 32 + 1, np.int32)
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        if self._matcher.is_error():
            raise InvalidField(self._field, f"has no valid continuation: {first_words(self._matcher.get_error())}")
        mask = found[: len(self._stops)]
        if self._vocab_size % 32:
            mask[-1] &= np.int32((1 << self._vocab_size % 32) - 1)
        mask &= self._not_stops
        may_end = self._matcher.is_accepting()
        self.ended = not mask.any()
        if self.ended and not may_end:
            raise InvalidField(self._field, "has no continuation that this model's vocabulary can spell")
        if may_end:
            mask |= self._stops
        return mask


class Ahead:
    """A position that looks ahead of an answer. All it takes is at most `LOOK_AHEAD_SECONDS` of processor time."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        # What the last look ahead found. The copy of the guide is made where more is needed.
        self._known = guide._ahead
        self._copy: Guide | None = None
        self._end = guide._clock() + LOOK_AHEAD_SECONDS
        self._tokens: list[int] = []
        self._looks: list[_Look] = []
        self._at = _Look(guide.mask, guide.ended, guide._look_seconds)
        guide._ahead = self._tokens, self._looks

    def forced(self) -> int | None:
        """Return the only token that may come next; None if there is a choice, or if the answer ends here."""
        mask = self._at.mask
        if self._at.ended or np.count_nonzero(mask) != 1:
            return None
        place = int(np.flatnonzero(mask)[0])
        word = int(mask[place]) & 0xFFFFFFFF
        return None if word & (word - 1) else 32 * place + word.bit_length() - 1

    def allows(self, token: int) -> bool:
        """Return whether a token may come next and does not end the answer."""
        return not self._at.ended and not _has(self._guide._stops, token) and _has(self._at.mask, token)

    def take(self, token: int) -> bool:
        """Advance by an allowed token, unless finding what may follow it takes too long. Return whether it did."""
        look = self._look(token)
        if look is None:
            return False
        self._tokens.append(token)
        self._looks.append(look)
        self._at = look
        return True

    def _look(self, token: int) -> _Look | None:
        place = len(self._tokens)
        tokens, looks = self._known
        if self._copy is None and place < len(tokens) and tokens[place] == token:
            return looks[place]
        # The next mask takes about as long as the last one did.
        if self._guide._clock() + self._at.seconds > self._end:
            return None
        if self._copy is None:
            # A copy: its errors are not the answer's.
            self._copy = copy(self._guide)
            self._copy._matcher = self._guide._matcher.deep_copy()
            self._guide._enter()
            self._copy._matcher.consume_tokens(self._tokens)
            self._copy._ahead = ([], [])
        before = self._copy.seconds
        try:
            self._copy.advance(token)
        except InvalidField:
            return None
        finally:
            self._guide.seconds += self._copy.seconds - before
        return _Look(self._copy.mask, self._copy.ended, self._copy._look_seconds)


def _mask_of(tokens: list[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _has(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


# the vocabulary -------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer in llguidance's interface. The last token stands for the end and is unknown to the model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self._speaker = _Speaker()
        # The library asks for the tokens of what is forced at each of its positions, in every answer.
        self._known = lru_cache(MOST_SPELLED)(self._spell)

    def load(self) -> None:
        """Read the vocabulary, which takes a while if it is large."""
        tokenizer, vocab_size = self._tokenizer, self._vocab_size
        known, special = min(tokenizer.size, vocab_size), tokenizer.vocabulary.special
        self.tokens = [tokenizer.bytes_of(token) for token in range(known)]
        self.tokens += [b""] * (vocab_size - known) + [b"<|weft end|>"]
        self.special_token_ids = [*sorted(token for token in special if token < vocab_size), vocab_size]

    def spell_for(self, salt: bytes) -> None:
        """Let this thread use only the texts that answers of this salt have spelled.

        A text that is known takes less time, which must not tell one tenant what another one's grammars force.
        """
        self._speaker.salt = salt

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._known(self._speaker.salt, text) if len(text) <= LONGEST_SPELLED else self._spell(b"", text)

    def _spell(self, salt: bytes, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False)


class _Speaker(local):
    """The salt of the answer for which a thread asks the library."""

    salt = b""

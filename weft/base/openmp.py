"""PyTorch's OpenMP threads beside those of our kernels.

After each of its loops, a thread of GNU OpenMP waits for the next one in 300,000 turns before it sleeps. On ARM they
take about 0.2 ms. On x86 each is a `pause` instruction of up to 140 cycles, so they take up to 16 ms, in which the
thread keeps a core busy without doing anything. A step with long prompts runs PyTorch's loops and our kernels in turn,
so our threads would have half of every core but one.

Where the CPU has units for bfloat16, long prompts are multiplied by oneDNN, whose threads are OpenMP's: there, a thread
that sleeps too soon is missed (docs/lab/benchmarks.md has both cases).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from weft.base.processor import multiplies_bfloat16

SPINS = "GOMP_SPINCOUNT"
# About 0.2 ms of `pause` on recent Intel processors, less on others.
X86_SPINS = 4000
X86 = ("x86_64", "AMD64", "i686")


def shorten_waits(
    environment: MutableMapping[str, str], machine: str, has_units: Callable[[], bool] = multiplies_bfloat16
) -> None:
    """Let idle threads of OpenMP sleep sooner, unless the user said how they wait. PyTorch must not be loaded yet.

    >>> found: dict[str, str] = {}
    >>> shorten_waits(found, "aarch64", lambda: False), found
    (None, {})
    >>> shorten_waits(found, "x86_64", lambda: True), found
    (None, {})
    >>> shorten_waits(found, "x86_64", lambda: False), found
    (None, {'GOMP_SPINCOUNT': '4000'})
    >>> mine = {"OMP_WAIT_POLICY": "active"}
    >>> shorten_waits(mine, "x86_64", lambda: False), mine
    (None, {'OMP_WAIT_POLICY': 'active'})
    """
    if machine in X86 and "OMP_WAIT_POLICY" not in environment and not has_units():
        environment.setdefault(SPINS, str(X86_SPINS))

"""What the tokenizers library keeps for good: a cache of words in every thread that ever encoded."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import tiny_model

# Words of which the library would remember all, 4 kB for each, if it were left to itself.
WORDS = 9000
MOST_BYTES = 12 << 20
SCRIPT = f"""
import ctypes, json, os, random, sys
from pathlib import Path
from weft.text.tokenizer import load_tokenizer

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

allocator = ctypes.CDLL(None)
allocator.mallinfo2.restype = Mallinfo
used_bytes = lambda: allocator.mallinfo2().uordblks
tokenizer, dice = load_tokenizer(Path(sys.argv[1])), random.Random(1)
before = used_bytes()
for _ in range({WORDS}):
    tokenizer.encode("".join(chr(dice.randrange(33, 127)) for _ in range(120)))
tokenizer.encode_all(["several", "texts"])
print(json.dumps([used_bytes() - before, len(os.listdir("/proc/self/task"))]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="counts what glibc handed out")
def test_many_odd_words_leave_little_behind_and_small_texts_start_no_thread() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(tiny_model.FOLDER))], capture_output=True, check=True
    )
    taken_bytes, threads = json.loads(found.stdout)
    assert taken_bytes < MOST_BYTES
    assert threads == 1

"""What the tests need before torch or Triton is imported: one thread, and Triton's interpreter without a GPU."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

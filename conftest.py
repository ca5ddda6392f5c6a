"""Test processes run side by side: one thread each, or they would fight for the cores and take ten times as long."""

import os

# Before anything imports torch; what it starts inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

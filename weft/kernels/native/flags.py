"""Flags of the C++ compiler that do not depend on the processor."""

from __future__ import annotations

# NaN and infinity keep their meaning (no -ffast-math): a kernel that reads unused memory must show it.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)

"""What a case of each parametrised test costs, as measured: `tests/support/costs.json`, in seconds of a quiet core.

    pytest -n 2 --junitxml=report.xml && python -m tests.support.costs report.xml

keeps what a report measured of tests that take long as a whole. On a busy machine, pass the share of a core that a
process had as well, such as 0.5.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from statistics import fmean

FILE = Path(__file__).with_name("costs.json")
# Tests below this are not worth a line.
LEAST_SECONDS = 0.5


def measured(report: Path, share: float = 1.0) -> dict[str, float]:
    """Return the mean seconds of the cases of each parametrised test of a report that took long as a whole."""
    cases: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        place, name = case.get("classname", ""), case.get("name", "")
        if "[" in name:
            cases[f"{place.replace('.', '/')}.py::{name.split('[')[0]}"].append(float(case.get("time", 0)) * share)
    return {test: round(fmean(each), 3) for test, each in sorted(cases.items()) if sum(each) >= LEAST_SECONDS}


def kept() -> dict[str, float]:
    return dict(json.loads(FILE.read_text()))


if __name__ == "__main__":
    costs = kept() | measured(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1.0)
    FILE.write_text(json.dumps(costs, indent=0, sort_keys=True) + "\n")

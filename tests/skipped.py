"""What all runs of pytest in `make test-all` have skipped, in a line: how many tests, and why."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

FILE = os.environ.pop("MINIKV_SKIPPED", None)  # no pytest that a test starts has it


def pytest_terminal_summary(terminalreporter):
    """Note the tests that ran and those that did not, if $MINIKV_SKIPPED names a file for it."""
    if FILE:
        passed = [report.nodeid for report in terminalreporter.stats.get("passed", [])]
        skipped = {
            report.nodeid: report.longrepr[2].removeprefix("Skipped: ")
            for report in terminalreporter.stats.get("skipped", [])
        }
        with open(FILE, "a", encoding="utf-8") as notes:
            notes.write(json.dumps([passed, skipped]) + "\n")


def told(file: Path) -> str:
    """A test that one run skips and another runs is not counted."""
    notes = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    ran = {nodeid for passed, _ in notes for nodeid in passed}
    reasons = {nodeid: why for _, skipped in notes for nodeid, why in skipped.items()}
    counts = Counter(why for nodeid, why in reasons.items() if nodeid not in ran)
    each = "; ".join(f"{count}: {why}" for why, count in counts.most_common())
    what = f"{counts.total():,} tests or whole files ({each})" if counts else "nothing"
    return f"== {len(ran):,} tests passed; skipped: {what}"


if __name__ == "__main__":
    print(told(Path(sys.argv[1])))

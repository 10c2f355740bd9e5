"""The scheduler's speed: placement, admission, backlogs, dispatch, journal, restart.

    python benchmarks/scheduler.py [--quick] [--json] [part …]

Parts: placement, admission, backlog, reads, dispatch, journal, restart; all by default. The last
column is the ratio to a plain baseline measured in the same run: a compiled search of every group
and shift, whose least cost is compared with ours (placement), a look at every group after each
event (dispatch), one client with a commit for each event (journal), a replay of all events without
a snapshot (restart). Admission, backlogs and reads have none.
"""

import sys

from benchmarks.report import report
from benchmarks.scheduling import (
    admission,
    backlog,
    dispatch,
    journal,
    placement,
    reads,
    restart,
)

PARTS = {
    "placement": placement.measure,
    "admission": admission.measure,
    "backlog": backlog.measure,
    "reads": reads.measure,
    "dispatch": dispatch.measure,
    "journal": journal.measure,
    "restart": restart.measure,
}


def main() -> None:
    """Measure the parts that the command line names."""
    wanted = [name for name in sys.argv[1:] if name in PARTS] or list(PARTS)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name in wanted:
        sys.stderr.write(f"{name} …\n")
        found, numbers = PARTS[name]()
        rows += found
        figures |= numbers
    columns = ("what", "p50 or rate", "p99", "times the baseline")
    report("Scheduler", columns, rows, figures)


if __name__ == "__main__":
    main()

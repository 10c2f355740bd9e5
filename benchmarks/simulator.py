"""The simulator: its speed, its memory, and how near it comes to a live cluster.

    python benchmarks/simulator.py [--json] [--full] [part …]

Parts: speed, memory, fidelity (minutes, with a live cluster); all by default. Everything runs
through the scheduler's own core. `--full` takes the three months as they are (minutes a policy)
instead of extrapolating from some events.
"""

import sys

from benchmarks.report import report
from benchmarks.simulating import fidelity, memory, speed

PARTS = {
    "speed": speed.measure,
    "memory": memory.measure,
    "fidelity": fidelity.measure,
}


def main() -> None:
    """Measure the parts that the command line names."""
    wanted = [name for name in sys.argv[1:] if name in PARTS] or list(PARTS)
    parts = []
    for name in wanted:
        sys.stderr.write(f"{name} …\n")
        parts.append(PARTS[name](full="--full" in sys.argv))
    figures: dict[str, float] = {}
    for part in parts:
        figures |= part.figures
    if "--json" in sys.argv:
        report("Simulator", (), (), figures)
        return
    for part in parts:
        report(part.title, part.columns, part.rows, part.figures)


if __name__ == "__main__":
    main()

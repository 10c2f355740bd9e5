"""Peak memory of a run, and of one over a trace ten times as long."""

import subprocess
import sys
from pathlib import Path

from benchmarks.simulating.part import Part
from benchmarks.simulating.workloads import passers
from plexrl.sim.replay import simulate

JOBS = 200
TIMES = 10
BAR_MB, BAR_GROWTH = 600.0, 1.10
ROOT = Path(__file__).parents[2]


def measure(*, full: bool) -> Part:
    """`full`: of traces three times as long, too."""
    jobs = JOBS * (3 if full else 1)
    short, long = _peak_mb(jobs), _peak_mb(TIMES * jobs)
    growth = long / short
    return Part(
        title="Memory: jobs that come, run 5 cycles each on 32 of 2 048 GPUs, and go",
        columns=("trace", "peak", "bar"),
        rows=[
            (f"{jobs:,} jobs", f"{short:.0f} MB", f"{BAR_MB:.0f} MB"),
            (f"{TIMES * jobs:,} jobs", f"{long:.0f} MB", f"{BAR_MB:.0f} MB"),
            ("growth", f"{100 * (growth - 1):.1f} %", f"{100 * (BAR_GROWTH - 1):.0f} %"),
        ],
        figures={"peak_mb": short, "peak_mb_10x": long, "peak_growth": growth},
    )


def _peak_mb(jobs: int) -> float:
    """Of a process of its own: a peak never falls again."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulating.memory", str(jobs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(found.stdout)


def main() -> None:
    """Run the trace and print the peak in MB."""
    result = simulate(passers(int(sys.argv[1])))
    assert result.jobs == int(sys.argv[1]), f"{result.jobs} jobs ended"
    sys.stdout.write(f"{result.speed.peak_bytes / 1e6}\n")


if __name__ == "__main__":
    main()

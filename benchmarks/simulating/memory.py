"""Measures the peak memory of a run, and of one over a trace ten times as long.

The retained state of ended jobs, profiles and predictions reaches its limits within a few hundred
jobs; tenants (`workloads.TENANTS`) are kept forever. So the second step of `--full`, from 2 000 to
20 000 jobs, starts from full retention.
"""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from benchmarks.report import Part
from benchmarks.simulating.workloads import passers
from benchmarks.sizes import sized
from plexrl.sim.engine.simulate import simulate

JOBS = sized(200, quick=10)
TIMES = sized(10, quick=2)
BAR_MB, BAR_GROWTH = 600.0, 1.10
ROOT = Path(__file__).parents[2]


def measure(*, full: bool) -> Part:
    """`full`: also of a trace that is ten times longer again."""
    counts = [JOBS, TIMES * JOBS, *([TIMES**2 * JOBS] if full else ())]
    peaks = [_peak_mb(count) for count in counts]
    growths = [long / short for short, long in pairwise(peaks)]
    rows: list[tuple[str, ...]] = [
        (f"{count:,} jobs", f"{peak:.1f} MB", f"{BAR_MB:.0f} MB")
        for count, peak in zip(counts, peaks, strict=True)
    ]
    rows += [
        (
            f"growth from {count:,} to {TIMES * count:,} jobs",
            f"{100 * (growth - 1):.1f} %",
            f"{100 * (BAR_GROWTH - 1):.0f} %",
        )
        for count, growth in zip(counts, growths, strict=False)
    ]
    figures = {"peak_mb": peaks[0], "peak_mb_10x": peaks[1], "peak_growth": growths[0]}
    if full:
        figures |= {"peak_mb_100x": peaks[2], "peak_growth_100x": growths[1]}
    return Part(
        title="Memory: jobs that come, run 5 cycles each on 32 of 2 048 GPUs, and go",
        columns=("trace", "peak", "bar"),
        rows=rows,
        figures=figures,
    )


def _peak_mb(jobs: int) -> float:
    """The peak of a separate process, because a peak never decreases."""
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

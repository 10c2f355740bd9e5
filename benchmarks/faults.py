"""Cuts the power of machines and stops processes for ever; counts what is lost, times what helps.

    python benchmarks/faults.py [--quick]

Power is cut at random moments of two training jobs, on one machine and on one of three hosts, whose
disks forget what was not flushed (`tests/faults/power_cuts.py`). `accepted_lost` counts operations
that a controller was told are accepted and that the journal lacks after a cut of the head, and
payloads of such operations that are damaged. Then each part and a worker of a cluster with three
training jobs is stopped (SIGSTOP) and never continued; `replaced_s` is the longest time until it
was ended for another. Nothing is reported unless all final weights equal those of undisturbed runs.
Needs root on Linux, for namespaces and loop devices.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from benchmarks.report import report
from benchmarks.sizes import sized
from tests.cluster.tools import has_ended
from tests.faults.live import LiveCluster, wait_until
from tests.faults.power_cuts import MACHINES, Losses, assert_survived
from tests.faults.test_faults import PARTS, assert_same, begin
from tests.hosts.loop_disk import why_no_loop_disk
from tests.hosts.network import why_impossible

CUTS = sized(25, quick=1)
"""Of each kind of cluster."""
SEED = 1
LIMIT_S = 180.0
"""Longer than a part that does not move is left alone."""


def cut_power() -> dict[str, Losses]:
    """Losses by kind of cluster."""
    losses = {}
    for machines in MACHINES:
        with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as scratch:
            losses[machines] = assert_survived(machines, SEED, CUTS, Path(scratch))
    return losses


def undisturbed_weights() -> dict[str, str]:
    """Digests of the final weights of the three jobs that nothing disturbs."""
    cluster = LiveCluster()
    try:
        cluster.begin()
        cluster.run_jobs()
        return cluster.weights()
    finally:
        cluster.close()


def replaced_after_s(
    victim: Callable[[LiveCluster], psutil.Process],
    chance: random.Random,
    undisturbed: dict[str, str],
) -> float:
    """Stop a process of a cluster whose jobs train; seconds until it has ended."""
    cluster = LiveCluster()
    try:
        begin(cluster, chance)
        process = victim(cluster)
        stopped_at = time.monotonic()
        process.suspend()
        wait_until(lambda: has_ended(process), "it was not replaced", LIMIT_S)
        seconds = time.monotonic() - stopped_at
        assert_same(cluster.weights(), undisturbed)
        return seconds
    finally:
        cluster.close()


def stop_processes() -> dict[str, float]:
    """Seconds until each was replaced, by what was stopped."""
    chance = random.Random(SEED)
    undisturbed = undisturbed_weights()
    victims: dict[str, Callable[[LiveCluster], psutil.Process]] = {
        module: partial(LiveCluster.part, module=module) for module in sized(PARTS, quick=PARTS[:1])
    }
    victims["a rank in a collective"] = lambda cluster: cluster.worker(0)
    seconds = {}
    for name, victim in victims.items():
        sys.stderr.write(f"stopping {name} …\n")
        seconds[name] = replaced_after_s(victim, chance, undisturbed)
    return seconds


def main() -> None:
    """Run the benchmark and print its tables."""
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        if reason := why_impossible() or why_no_loop_disk(Path(folder)):
            sys.exit(reason)
    losses = cut_power()
    report(
        "Power cuts during two training jobs; weights equal those of undisturbed runs",
        ("machines", "cuts", "accepted", "of these lost", "payloads", "of these damaged"),
        [
            (name, *map(str, (loss.cuts, loss.accepted, loss.missing, loss.payloads, loss.damaged)))
            for name, loss in losses.items()
        ],
        {
            "power_cuts": sum(loss.cuts for loss in losses.values()),
            "accepted_lost": sum(loss.missing + loss.damaged for loss in losses.values()),
        },
    )
    seconds = stop_processes()
    report(
        "A process stopped for ever during three training jobs; weights equal those of undisturbed "
        "runs",
        ("stopped", "replaced after"),
        [(name, f"{value:.0f} s") for name, value in seconds.items()],
        {"replaced_s": max(seconds.values())},
    )


if __name__ == "__main__":
    main()

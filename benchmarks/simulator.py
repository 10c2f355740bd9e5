"""Measures the simulator: speed, memory, accuracy against a live cluster, and published figures.

    python benchmarks/simulator.py [--quick] [--json] [--full] [part …]

Parts: speed, memory, fidelity (minutes, with a live cluster), eta, packing, valleys, starvation,
cluster, pareto, rollout_gpus, mixed_sizes, and drain, which takes hours and so is only run by name;
by default all the others. Everything runs through the scheduler's own core. `--full` adds three
months of full groups to speed and memory (minutes), and takes whole traces instead of samples
(drain).
"""

import sys

from benchmarks.report import report
from benchmarks.simulating import (
    cluster,
    drain,
    eta,
    fidelity,
    memory,
    mixed_sizes,
    packing,
    pareto,
    rollout_gpus,
    speed,
    starvation,
    valleys,
)
from benchmarks.sizes import sized

LONG = sized(
    ("drain",),
    quick=(
        *("drain", "fidelity", "eta", "valleys", "starvation"),
        *("cluster", "pareto", "rollout_gpus", "mixed_sizes"),
    ),
)
"""Parts that are run by name only; with `--quick` their own modules run them."""

PARTS = {
    "speed": speed.measure,
    "memory": memory.measure,
    "fidelity": fidelity.measure,
    "eta": eta.measure,
    "packing": packing.measure,
    "valleys": valleys.measure,
    "starvation": starvation.measure,
    "cluster": cluster.measure,
    "pareto": pareto.measure,
    "rollout_gpus": rollout_gpus.measure,
    "mixed_sizes": mixed_sizes.measure,
    "drain": drain.measure,
}


def main() -> None:
    """Measure the parts that the command line names."""
    wanted = [name for name in sys.argv[1:] if name in PARTS]
    wanted = wanted or [name for name in PARTS if name not in LONG]
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

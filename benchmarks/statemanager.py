"""The StateManager's speed: tiers, pulls, plans, control plane, switches, checkpoints.

    python benchmarks/statemanager.py [--quick] [--json] [part …]

Parts: switches, overlap, nvme, pulls, plans, control, replicas, checkpoints, checkpoint_writers,
optimizer, delta; all by default. Baselines are taken in turns with what is measured: plain memory
copies between memory files, `fio`, `iperf3`, a bare echo between two processes, plain writes,
torch's AdamW.
"""

import os
import sys

from benchmarks.report import report
from benchmarks.state import (
    checkpoint_writers,
    checkpoints,
    control,
    host,
    host_optimizer,
    nvme,
    plans,
    pulls,
    replicas,
    rl_delta,
)
from plexrl.process.memory.tuning import tune

PARTS = {
    "switches": host.measure_switches,
    "overlap": host.measure_overlap,
    "nvme": nvme.measure,
    "pulls": pulls.measure,
    "plans": plans.measure,
    "control": control.measure,
    "replicas": replicas.measure,
    "checkpoints": checkpoints.measure,
    "checkpoint_writers": checkpoint_writers.measure,
    "optimizer": host_optimizer.measure,
    "delta": rl_delta.measure,
}


def main() -> None:
    """Measure the parts that the command line names."""
    environment = tune(os.environ)
    if environment != dict(os.environ):
        # As workers and daemons are started; the plain copies gain from it as well.
        os.execve(sys.executable, sys.orig_argv, environment)
    wanted = [name for name in sys.argv[1:] if name in PARTS] or list(PARTS)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name in wanted:
        sys.stderr.write(f"{name} …\n")
        found, numbers = PARTS[name]()
        rows += found
        figures |= numbers
    report("StateManager", ("what", "best", "usual", "bar"), rows, figures)


if __name__ == "__main__":
    main()

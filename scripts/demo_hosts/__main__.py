"""Trains two tenants' jobs on three hosts, then on one machine, and compares every bit.

    make demo-hosts
    python -m scripts.demo_hosts --steps 20 --json

Each host is a set of Linux namespaces of this machine (`tests/hosts`): a head and two nodes that
share no file system, no memory and no process. The four workers of each job's trainer span both
nodes. Then the same jobs run on a cluster of one machine with the same layout. The rewards of all
steps and the final weights must be equal, bit for bit. Exit status 1: something differs.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.hosts.cluster import HostCluster, SoloCluster
from tests.hosts.host import HostProcess
from tests.hosts.network import hosts, why_impossible

JOBS = (("sort", "alice"), ("reverse", "bob"))
"""Task and tenant of each job."""
LAYOUT = "dp=2,tp=2"
GPUS_PER_NODE = 3
"""Fewer than the four ranks of a trainer, so that it must span both nodes; the two rollouts take
what is left."""
PROGRESS_S = 3.0
CONTROLLER = Path(__file__).with_name("controller.py")


@dataclass(slots=True, kw_only=True)
class JobRun:
    """One job's run on one cluster."""

    task: str
    tenant: str
    hosts: tuple[str, ...] = ()
    """Hosts of the trainer's ranks."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    held_out: list[float] = field(default_factory=list)
    """Reward on held-out prompts, before and after."""
    weights: str = ""
    """SHA-256 of the final weights."""
    seconds: float = 0.0


class Demo:
    """Runs the jobs on a cluster, and says how far they are."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def run(self, name: str, cluster: SoloCluster) -> list[JobRun]:
        """Run both jobs at the same time."""
        started = time.monotonic()
        runs = [JobRun(task=task, tenant=tenant) for task, tenant in JOBS]
        processes = [self._start(cluster, run) for run in runs]
        told = 0.0
        while True:
            is_over = all(process.poll() is not None for process in processes)
            for run, process in zip(runs, processes, strict=True):
                self._read(cluster, run, process, time.monotonic() - started)
            if is_over or time.monotonic() - told >= PROGRESS_S:
                told = time.monotonic()
                self._tell(name, told - started, runs)
            if is_over:
                return runs
            self._find_hosts(cluster, runs)
            time.sleep(0.3)

    def _start(self, cluster: SoloCluster, run: JobRun) -> HostProcess:
        arguments = ("--task", run.task, "--steps", str(self._steps), "--layout", LAYOUT)
        environment = cluster.create_tenant(run.tenant)
        return cluster.head.start("python", str(CONTROLLER), *arguments, env=environment)

    def _read(
        self, cluster: SoloCluster, run: JobRun, process: HostProcess, seconds: float
    ) -> None:
        """Take over what the controller has printed."""
        text = process.text()
        if process.poll() not in (None, 0):
            sys.exit(f"the controller of {run.task!r} ended with {process.poll()}:\n{text[-4000:]}")
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        run.rewards = [row["reward"] for row in rows if "reward" in row]
        run.held_out = [row["held_out"] for row in rows if "held_out" in row]
        for row in rows:
            if "checkpoint" in row and not run.weights:
                run.weights = hashlib.sha256(cluster.checkpoint(row["checkpoint"])).hexdigest()
                run.seconds = seconds

    def _find_hosts(self, cluster: SoloCluster, runs: Sequence[JobRun]) -> None:
        if all(run.hosts for run in runs):
            return
        for group in cluster.ask("groups"):
            for run in runs:
                if f"{run.task}/actor" in group["members"]:
                    run.hosts = tuple(sorted({str(gpu["node"]) for gpu in group["gpus"]}))

    def _tell(self, name: str, seconds: float, runs: Sequence[JobRun]) -> None:
        parts = []
        for run in runs:
            reward = f"reward {run.rewards[-1]:.3f}" if run.rewards else "starting"
            parts.append(f"{run.task} {len(run.rewards)}/{self._steps} {reward}")
        self._console.print(f"{name}  {seconds:4.0f} s  {', '.join(parts)}", highlight=False)


def is_equal(many: JobRun, one: JobRun) -> bool:
    """Whether rewards and weights agree in every bit."""
    return (many.rewards, many.held_out, many.weights) == (one.rewards, one.held_out, one.weights)


def show(console: Console, many: Sequence[JobRun], one: Sequence[JobRun]) -> None:
    """Print the comparison as a table of 80 columns."""
    table = Table(title="Three hosts beside one machine", title_justify="left", box=None)
    for column in ("job", "tenant", "ranks on", "steps", "held-out", "rewards", "weights"):
        table.add_column(column, justify="right" if column in ("steps", "held-out") else "left")
    for a, b in zip(many, one, strict=True):
        table.add_row(
            a.task,
            a.tenant,
            ", ".join(a.hosts),
            str(len(a.rewards)),
            f"{a.held_out[0]:.2f} to {a.held_out[-1]:.2f}",
            "equal" if (a.rewards, a.held_out) == (b.rewards, b.held_out) else "DIFFER",
            f"equal, {a.weights[:6]}" if a.weights == b.weights else "DIFFER",
        )
    console.print(table)
    seconds = [max(run.seconds for run in runs) for runs in (many, one)]
    console.print(f"three hosts: {seconds[0]:.0f} s, one machine: {seconds[1]:.0f} s")


def main() -> None:
    """Run both clusters; exits with 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="RL steps of each job")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args()
    reason = why_impossible()
    if reason:
        sys.exit(f"make demo-hosts needs Linux namespaces, as root: {reason}")
    console = Console(stderr=options.json, width=80, soft_wrap=True)
    demo = Demo(console, options.steps)
    console.print("Three hosts: a head, and two nodes that join it over TLS …")
    with hosts("head", "node-a", "node-b") as network:
        cluster = HostCluster(network, gpus=GPUS_PER_NODE)
        many = demo.run("hosts", cluster)
        cluster.end()
    console.print("One machine, with the same jobs and layouts …")
    with hosts("solo") as network:
        (host,) = network
        solo = SoloCluster(host, gpus=2 * GPUS_PER_NODE)
        one = demo.run("alone", solo)
        solo.end()
    spans = all(len(run.hosts) == 2 for run in many)
    equal = all(is_equal(a, b) for a, b in zip(many, one, strict=True))
    if options.json:
        found: dict[str, Any] = {"equal": equal, "spans": spans}
        found["hosts"] = [asdict(run) for run in many]
        found["one_machine"] = [asdict(run) for run in one]
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        show(console, many, one)
    if not (equal and spans):
        sys.exit("the runs differ" if not equal else "a trainer did not span both nodes")


if __name__ == "__main__":
    main()

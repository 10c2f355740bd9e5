"""Prints a digest of the scheduler's decisions per policy; a refactoring must not change any.

Each policy runs three workloads: warm and without failures; cold, one step stale, operation by
operation; and with failures of nodes and workers. The digest is SHA-256 over every event, its time
and the commands that answer it.

    python -m benchmarks.simulating.command_log [policy ...] > before.txt
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator

import msgspec

from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import Behaviour, Failures, Pool, Scenario
from plexrl.sim.workload.source.trace_source import PublishedSource
from plexrl.traces import Shape
from plexrl.wire import messages as cmd

DAY_S = 86_400.0
SHORT = Shape(cap_s=DAY_S / 8)
FULL = Shape(cap_s=DAY_S / 8, backlog=True)


def scenarios(policy: str) -> Iterator[tuple[str, Scenario]]:
    """Name and scenario of each workload."""
    many = PublishedSource(span_s=8 * DAY_S, shape=FULL, seed=1)
    few = PublishedSource(span_s=2 * DAY_S, shape=SHORT, seed=2)
    pools = (Pool(nodes=32),)
    yield "backlog", Scenario(source=many, pools=pools, policy=policy, seed=1)
    stale = Behaviour(staleness=1, jitter=0.2)
    yield (
        "cold",
        Scenario(
            source=few,
            pools=pools,
            policy=policy,
            seed=2,
            behaviour=stale,
            warm=False,
            detail="operation",
        ),
    )
    breaks = Failures(node_mtbf_s=DAY_S, worker_mtbf_s=DAY_S / 2, state_survives=0.5)
    yield "failures", Scenario(source=few, pools=pools, policy=policy, seed=3, failures=breaks)


def digest(scenario: Scenario) -> tuple[int, str]:
    """Number of events, and SHA-256 of the log of events and commands."""
    run, found = TraceRun(scenario), hashlib.sha256()

    def observe(event: ev.Event, commands: list[cmd.Command], now: float) -> None:
        found.update(b"%r %s\n" % (now, ev.CODEC.encode(event)))
        for command in commands:
            found.update(b"  %s\n" % msgspec.json.encode(command))

    run.shell.observe(observe)
    run.start()
    while run.shell.run(10_000) == 10_000:
        pass
    run.check_it_ended()
    return run.shell.events, found.hexdigest()


def main() -> None:
    """Print a line for each policy and workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policies", nargs="*", metavar="policy")
    for policy in parser.parse_args().policies or SIM_POLICIES:
        for name, scenario in scenarios(policy):
            events, hexdigest = digest(scenario)
            sys.stdout.write(f"{policy:22} {name:9} {events:8} {hexdigest}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""The slowest `handle` call while 10 000 deployments of one kind wait, in CPU seconds: kinds that
have much in common, and kinds of which no two are alike. Of the kind with the most differences also
while 74 000 wait. The garbage collector is set as in the service."""

import gc
import random
import time
from collections.abc import Callable, Iterator

from benchmarks.scheduling.cluster import GIB, GPUS, config, demand, node
from benchmarks.sizes import sized
from plexrl.process.garbage_collection import freeze_existing_objects
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev

WAITING = sized(10_000, quick=40)
MANY = sized(74_000, quick=80)
NODES = 64
TENANTS = 1000
STARVATION_S = 1000.0
"""Past the bound by default."""

LAST = sized(200, quick=8)
"""Submissions that are measured: the last ones, before which the others wait."""

Wish = tuple[dict[str, object], list[dict[str, object]]]
"""Settings of a job and of each of its deployments."""


def _alike(_: random.Random) -> Wish:
    return {}, [{"workers": GPUS}]


def _lengths(rng: random.Random) -> Wish:
    return {"expected_s": rng.uniform(60.0, 1e6)}, [{"workers": GPUS}]


def _traces(rng: random.Random) -> Wish:
    return {}, [{"workers": GPUS, "trace": demand(rng)}]


def _gangs(_: random.Random) -> Wish:
    return {"gang": 2}, [{"workers": GPUS}, {"workers": GPUS, "kind": "rollout"}]


def _mixed_gangs(rng: random.Random) -> Wish:
    sizes = [rng.randint(1, 64) for _ in range(rng.randint(2, 4))]
    return {"gang": len(sizes), "expected_s": rng.uniform(60.0, 1e6)}, [
        {"workers": workers, "kind": rng.choice(("train", "rollout")), "trace": demand(rng)}
        for workers in sizes
    ]


def _tenants(rng: random.Random) -> Wish:
    tenant = f"t{rng.randrange(TENANTS)}"
    return {"tenant": tenant, "expected_s": rng.uniform(60.0, 1e6)}, [{"workers": GPUS}]


def _everything(rng: random.Random) -> Wish:
    job = {
        "tenant": f"t{rng.randrange(TENANTS)}",
        "expected_s": rng.uniform(60.0, 1e6),
        "priority": rng.randint(-5, 0),
    }
    fields: dict[str, object] = {"workers": rng.randint(1, 64), "exclusive": rng.random() < 0.5}
    return job, [fields | ({"trace": demand(rng)} if rng.random() < 0.5 else {})]


KINDS: dict[str, Callable[[random.Random], Wish]] = {
    "alike": _alike,
    "lengths": _lengths,
    "traces": _traces,
    "gangs": _gangs,
    "mixed_gangs": _mixed_gangs,
    "tenants": _tenants,
    "everything": _everything,
}


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name, kind in KINDS.items():
        for policy in ("pack", "spread+backfill"):
            key = f"backlog_{name}_{policy.replace('+', '_')}_ms"
            _tell(rows, figures, key, (policy, kind, WAITING))
    _tell(rows, figures, "backlog_many_ms", ("spread+backfill", _everything, MANY))
    return rows, figures


def _tell(
    rows: list[tuple[str, ...]],
    figures: dict[str, float],
    key: str,
    what: tuple[str, Callable[[random.Random], Wish], int],
) -> None:
    """Measure and enter one line."""
    policy, kind, waiting = what
    slowest = _slowest(policy, kind, waiting)
    figures[key] = max(slowest.values()) * 1e3
    name = kind.__name__.strip("_").replace("_", " ")
    label = f"{waiting} waiting, {name}, {policy}: slowest call"
    which = max(slowest, key=lambda each: slowest[each])
    rows.append((label, f"{figures[key]:.1f} ms", which, ""))


def _slowest(policy: str, kind: Callable[[random.Random], Wish], most: int) -> dict[str, float]:
    """Seconds of the slowest call by kind of event."""
    core, rng = SchedulerCore(config(policy=policy)), random.Random(1)
    for index in range(NODES):
        core.handle(node(index), 0.0)
    for index in range(NODES):
        for event in _job(f"there{index}", {}, [{"workers": GPUS, "exclusive": True}]):
            core.handle(event, 0.0)
    slowest: dict[str, float] = {}

    def handle(event: ev.Event, now: float) -> None:
        began = time.thread_time()
        core.handle(event, now)
        took_s = time.thread_time() - began
        name = type(event).__name__
        slowest[name] = max(slowest.get(name, 0.0), took_s)

    now, waiting, number = 1.0, 0, 0
    is_frozen = False
    while waiting < most:
        job, deployments = kind(rng)
        if waiting >= most - LAST and not is_frozen:
            freeze_existing_objects()
            is_frozen = True
        for event in _job(f"j{number}", job, deployments):
            if is_frozen:
                handle(event, now)
            else:
                core.handle(event, now)
        step_s = 0.1 * WAITING / most
        number, waiting, now = number + 1, waiting + len(deployments), now + step_s
    # Before anybody starves, and when all do.
    for offset, at in enumerate((now, now + STARVATION_S)):
        for index in range(4):
            there = f"there{8 * offset + index}"
            handle(ev.JobFinished(job=there, outcome="completed"), at)  # type: ignore[arg-type]
            handle(node(NODES + 4 * offset + index), at)
            for event in _job(f"late{offset}{index}", {}, [{"workers": 1}]):
                handle(event, at)
            lost = f"n{NODES + 4 * offset + index:05}"
            handle(ev.NodeLost(node=lost), at)  # type: ignore[arg-type]
    # The next population would else keep this one.
    gc.unfreeze()
    return slowest


def _job(
    job: str, fields: dict[str, object], deployments: list[dict[str, object]]
) -> Iterator[ev.Event]:
    submitted: dict[str, object] = {
        "job": job,
        "tenant": "t",
        "name": "job",
        "controller_timeout_s": 1e9,
        "reattach_timeout_s": 1e9,
        **fields,
    }
    yield ev.JobSubmitted(**submitted)  # type: ignore[arg-type]  # read from a table
    for index, each in enumerate(deployments):
        created: dict[str, object] = {
            "deployment": f"{job}/{index}",
            "job": job,
            "kind": "train",
            "state_bytes": 8 * GIB,
            "exclusive": False,
            "spec_json": "{}",
            **each,
        }
        yield ev.DeploymentCreated(**created)  # type: ignore[arg-type]  # read from a table

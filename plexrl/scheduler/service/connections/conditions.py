"""What is wrong in the cluster now, as the scheduler knows it: for operators and metrics."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from plexrl.process.conditions import Condition
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.operations.held.holding import foreign_text
from plexrl.scheduler.service.shell import Shell

NAMED_MAX = 10
"""Most objects that one message names."""
CLOCK_AHEAD_S = 60.0
"""The scheduler's time may be this much later than the machine's clock without a word."""

Plain = dict[str, Any]


def find_conditions(shell: Shell) -> list[Plain]:
    """The conditions that stop or delay work, each as `Condition` in plain values."""
    core, now = shell.core, shell.clock.now()
    reported = [each for found in shell.agents.conditions.values() for each in found]
    return [
        *shell.outage.conditions.view(),
        *shell.fault_conditions.view(),
        *_held(core),
        *_foreign_memory(core),
        *_overdue(core, now),
        *_lost_nodes(core),
        *_service_levels(shell),
        *_blocking_heads(core, now),
        *_merged(reported),
        *_clock(shell),
    ]


def _condition(code: str, message: str, since: float) -> Plain:
    return {"code": code, "message": message, "since": since}


def _held(core: SchedulerCore) -> list[Plain]:
    held = core.held_deployments()
    if not held:
        return []
    reasons = "; ".join(f"{each['deployment']}: {each['message']}" for each in held[:NAMED_MAX])
    message = f"{len(held)} deployments wait for memory: {reasons}"
    return [_condition("deployments_held", message, min(each["since"] for each in held))]


def _foreign_memory(core: SchedulerCore) -> list[Plain]:
    foreign = core.foreign_memory()
    if not foreign:
        return []
    texts = "; ".join(f"{each['node']}: {foreign_text(each)}" for each in foreign[:NAMED_MAX])
    message = f"{texts}: end what is not needed, or drain the node"
    return [_condition("foreign_memory", message, min(each["since"] for each in foreign))]


def _overdue(core: SchedulerCore, now: float) -> list[Plain]:
    overdue = core.overdue(now)
    if not overdue:
        return []
    texts = [
        f"{each['kind']} {each['operation']} of {each['deployment']} was expected to end "
        f"{now - each['expected_at']:.0f} s ago, and its workers are replaced in "
        f"{max(0.0, each['replaced_at'] - now):.0f} s if it does not"
        for each in overdue[:NAMED_MAX]
    ]
    since = min(each["expected_at"] for each in overdue)
    return [_condition("operation_overdue", _listed(texts, len(overdue)), since)]


def _lost_nodes(core: SchedulerCore) -> list[Plain]:
    lost = core.lost_nodes()
    if not lost:
        return []
    names = _listed([name for name, _ in lost[:NAMED_MAX]], len(lost))
    message = (
        f"the agents of these nodes are not connected, so their workers do not run: {names}. "
        "See to the machine or its network, or run `plexrl nodes remove` if it does not come back"
    )
    return [_condition("node_lost", message, min(at for _, at in lost))]


def _service_levels(shell: Shell) -> list[Plain]:
    """The jobs that wait more than they, or their tenants, have asked for. The cluster's own bound
    is an aim of placement, and promises nothing."""
    over = [
        each
        for each in shell.core.service_levels()
        if each["is_promised"] and (each["waiting_part"] or 0.0) > each["slo"]
    ]
    known, now = shell.breached_since, shell.clock.now()
    shell.breached_since = {each["job"]: known.get(each["job"], now) for each in over}
    if not over:
        return []
    texts = [
        f"{each['job']} of {each['tenant']} waited {each['waiting_part']:.0%} of its time and "
        f"accepts {each['slo']:.0%}"
        for each in over[:NAMED_MAX]
    ]
    message = f"jobs wait for others more than they accept: {_listed(texts, len(over))}"
    return [_condition("slo_breached", message, min(shell.breached_since.values()))]


def _blocking_heads(core: SchedulerCore, now: float) -> list[Plain]:
    """The jobs whose wait keeps GPUs idle, because they have starved for too long."""
    heads = core.blocking_heads(now)
    if not heads:
        return []
    texts = [
        f"{each['deployment']} of {each['tenant']} waits for {each['workers']} GPUs and keeps "
        f"{each['free_gpus']} idle"
        for each in heads[:NAMED_MAX]
    ]
    message = (
        f"no other job gets free GPUs before these, which starve: {_listed(texts, len(heads))}. "
        "Cancel or preempt what runs, raise `starvation_bound_s`, or give jobs an `expected_s` "
        "that holds"
    )
    return [_condition("head_job_blocks", message, heads[0]["since"])]


def _merged(conditions: Iterable[Condition]) -> list[Plain]:
    """One condition of each code that nodes have reported."""
    by_code: dict[str, list[Condition]] = {}
    for each in conditions:
        by_code.setdefault(each.code, []).append(each)
    return [
        _condition(
            code,
            _listed([each.message for each in found[:NAMED_MAX]], len(found)),
            min(each.since for each in found),
        )
        for code, found in sorted(by_code.items())
    ]


def _clock(shell: Shell) -> list[Plain]:
    """The scheduler's time never goes back: events of a time when the machine's clock was ahead
    would come after later ones."""
    ahead_s = shell.clock.now() - time.time()
    if ahead_s <= CLOCK_AHEAD_S:
        return []
    message = (
        f"the cluster's times are {ahead_s:.0f} s ahead of this machine's clock, because the clock "
        "was ahead at an earlier start or has been set back since: decisions need differences only "
        "and are right; shown times are right again once the cluster has been stopped for as long"
    )
    return [_condition("clock_ahead", message, shell.clock.started_at)]


def _listed(texts: Sequence[str], count: int) -> str:
    more = f"; and {count - len(texts)} more" if count > len(texts) else ""
    return "; ".join(texts) + more

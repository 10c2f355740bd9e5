"""What is wrong in the cluster now, as the scheduler knows it: for operators and metrics."""

import time
from collections.abc import Iterable, Sequence

import msgspec

from plexrl.process.conditions import Condition, ConditionView
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.operations.deadlines.overdue import OverdueView, overdue_view
from plexrl.scheduler.operations.held.holding import foreign_memory_view, foreign_text, held_view
from plexrl.scheduler.queries.explain_placement import blocking_heads
from plexrl.scheduler.queries.views import lost_nodes, restarting, service_levels
from plexrl.scheduler.service.shell import Shell

NAMED_MAX = 10
"""Most objects that one message names."""
CLOCK_AHEAD_S = 60.0
"""The scheduler's time may be this much later than the machine's clock without a word."""


def find_conditions(shell: Shell) -> list[ConditionView]:
    """The conditions that stop or delay work, each as `Condition` in plain values."""
    core, now = shell.core, shell.clock.now()
    reported = [each for found in shell.agents.conditions.values() for each in found]
    return [
        *shell.outage.conditions.view(),
        *shell.fault_conditions.view(),
        *_history(shell),
        *_held(core),
        *_foreign_memory(core),
        *_overdue(core, now),
        *_restarting(core),
        *_lost_nodes(core),
        *_service_levels(shell),
        *_blocking_heads(core, now),
        *_merged(reported),
        *_clock(shell),
    ]


def _condition(
    code: str, found: Sequence[tuple[str, float]], message: str = "{}"
) -> list[ConditionView]:
    """The condition of all that was found, each with its text and since when it is so; none if
    nothing was found. `message` has the texts in place of `{}`."""
    if not found:
        return []
    texts = [text for text, _ in found[:NAMED_MAX]]
    if len(found) > NAMED_MAX:
        texts.append(f"and {len(found) - NAMED_MAX} more")
    since = min(since for _, since in found)
    return [{"code": code, "message": message.format("; ".join(texts)), "since": since}]


def _history(shell: Shell) -> list[ConditionView]:
    found = None if shell.history is None else shell.history.condition()
    return [] if found is None else [msgspec.to_builtins(found)]


def _held(core: SchedulerCore) -> list[ConditionView]:
    held = held_view(core.cluster.state, sees_all=True)
    found = [(f"{each['deployment']}: {each['message']}", each["since"]) for each in held]
    return _condition("deployments_held", found, f"{len(held)} deployments wait for memory: {{}}")


def _foreign_memory(core: SchedulerCore) -> list[ConditionView]:
    foreign = foreign_memory_view(core.cluster.state)
    found = [(f"{each['node']}: {foreign_text(each)}", each["since"]) for each in foreign]
    return _condition("foreign_memory", found, "{}: end what is not needed, or drain the node")


def _overdue(core: SchedulerCore, now: float) -> list[ConditionView]:
    found = [_overdue_text(run, now) for run in overdue_view(core.cluster, now)]
    return _condition("operation_overdue", found)


def _overdue_text(run: OverdueView, now: float) -> tuple[str, float]:
    since, what = run["expected_at"], f"{run['kind']} {run['operation']} of {run['deployment']}"
    late = f"has run for {now - run['began_at']:.0f} s, and it is not known yet how long it takes"
    if since is not None:
        late = f"was expected to end {now - since:.0f} s ago"
    left_s = max(0.0, run["replaced_at"] - now)
    text = f"{what} {late}, and its workers are replaced in {left_s:.0f} s if it does not end"
    return text, run["began_at"] if since is None else since


def _restarting(core: SchedulerCore) -> list[ConditionView]:
    message = "workers are started again and again, and complete no operation: {}"
    return _condition("workers_restarting", restarting(core.cluster.state), message)


def _lost_nodes(core: SchedulerCore) -> list[ConditionView]:
    message = (
        "the agents of these nodes are not connected, so their workers do not run: {}. See to the "
        "machine or its network, or run `plexrl nodes remove` if it does not come back"
    )
    return _condition("node_lost", lost_nodes(core.cluster.state), message)


def _service_levels(shell: Shell) -> list[ConditionView]:
    """The jobs that wait more than they, or their tenants, have asked for. The cluster's own bound
    is an aim of placement, and promises nothing."""
    over = [
        level
        for level in service_levels(shell.core.cluster)
        if level["is_promised"] and (level["waiting_part"] or 0.0) > level["slo"]
    ]
    known, now = shell.breached_since, shell.clock.now()
    shell.breached_since = {each["job"]: known.get(each["job"], now) for each in over}
    found = [
        (
            f"{each['job']} of {each['tenant']} waited {each['waiting_part']:.0%} of its time and "
            f"accepts {each['slo']:.0%}",
            shell.breached_since[each["job"]],
        )
        for each in over
    ]
    return _condition("slo_breached", found, "jobs wait for others more than they accept: {}")


def _blocking_heads(core: SchedulerCore, now: float) -> list[ConditionView]:
    """The jobs whose wait keeps GPUs idle, because they have starved for too long."""
    found = [
        (
            f"{head['deployment']} of {head['tenant']} waits for {head['workers']} GPUs and keeps "
            f"{head['free_gpus']} idle",
            head["since"],
        )
        for head in blocking_heads(core.cluster, now)
    ]
    message = (
        "no other job gets free GPUs before these, which starve: {}. Cancel or preempt what runs, "
        "raise `starvation_bound_s`, or give jobs an `expected_s` that holds"
    )
    return _condition("head_job_blocks", found, message)


def _merged(conditions: Iterable[Condition]) -> list[ConditionView]:
    """One condition of each code that nodes have reported."""
    by_code: dict[str, list[tuple[str, float]]] = {}
    for each in conditions:
        by_code.setdefault(each.code, []).append((each.message, each.since))
    return [condition for code in sorted(by_code) for condition in _condition(code, by_code[code])]


def _clock(shell: Shell) -> list[ConditionView]:
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
    return _condition("clock_ahead", [(message, shell.clock.started_at)])

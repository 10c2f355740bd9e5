"""Which jobs have the GPUs that a job waits for, the ones that do nothing with them first."""

from enum import StrEnum
from typing import Any

from plexrl.ids import JobId
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.queries.explain_placement import why_no_gpus
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Job

View = dict[str, Any]

HOLDERS_MAX = 20
"""Jobs that are named."""


class Condition(StrEnum):
    """What a job that has GPUs does with them, the most dispensable first."""

    DETACHED = "detached"
    """Its controller is taken for gone: it is cancelled unless one comes back."""
    SILENT = "silent"
    """Nothing was heard of its controller for half of the time after which it is taken for gone."""
    IDLE = "idle"
    """Its controller lives, and has nothing to run."""
    WORKING = "working"


_ORDER = tuple(Condition)


def holders(context: Context, job: Job, now: float, *, sees_all: bool) -> list[View]:
    """The jobs that have GPUs which a waiting deployment of `job` could use; where a quota keeps it
    waiting, those of its tenant. Who another tenant's job is is told to an operator (`sees_all`).
    """
    waiting = [
        each for each in map(context.deployment, job.deployments) if each.state == WpgState.WAITING
    ]
    gpus: dict[JobId, int] = {}
    for deployment in waiting:
        for name, count in _suitable(context, deployment, now).items():
            gpus[name] = max(count, gpus.get(name, 0))
    rows = [_row(context, context.job(name), count, now) for name, count in gpus.items()]
    rows.sort(key=_dispensable_first)
    for row in rows:
        if not sees_all and row["tenant"] != job.tenant:
            row["job"] = row["tenant"] = row["name"] = None
    return rows[:HOLDERS_MAX]


def _suitable(context: Context, waiting: Deployment, now: float) -> dict[JobId, int]:
    """GPUs of each other job that would help the deployment if they came free."""
    _, rule, _ = why_no_gpus(context, waiting, now)
    if rule not in ("capacity", "turn", "quota"):
        return {}
    tenant = context.job(waiting.job).tenant
    found: dict[JobId, int] = {}
    for group in context.state.groups.values():
        if rule != "quota" and waiting.node_type not in ("", group.node_type):
            continue
        for name in group.members:
            member = context.deployment(name)
            if member.job == waiting.job:
                continue
            if rule != "quota" or context.job(member.job).tenant == tenant:
                found[member.job] = found.get(member.job, 0) + member.workers
    return found


def _row(context: Context, job: Job, gpus: int, now: float) -> View:
    deployments = [context.deployment(name) for name in job.deployments]
    works = any(bool(each.queue or each.running or each.moving) for each in deployments)
    silent_s = now - job.seen_at
    if not job.attached:
        condition = Condition.DETACHED
    elif silent_s > job.controller_timeout_s / 2:
        condition = Condition.SILENT
    else:
        condition = Condition.WORKING if works else Condition.IDLE
    worked_at = max([_worked_at(each) for each in deployments], default=job.submitted_at)
    end_s = job.controller_timeout_s + job.reattach_timeout_s - silent_s
    is_leaving = condition in (Condition.DETACHED, Condition.SILENT)
    return {
        "job": job.job,
        "tenant": job.tenant,
        "name": job.name,
        "gpus": gpus,
        "condition": condition.value,
        "silent_s": silent_s,
        "idle_s": None if works else now - worked_at,
        "cancelled_in_s": max(0.0, end_s) if is_leaving else None,
    }


def _worked_at(deployment: Deployment) -> float:
    """When it last did something, or could first have."""
    metered_at = deployment.metered_at if deployment.metered_at is not None else 0.0
    return max(deployment.created_at, deployment.ready_at, deployment.burst.served_at, metered_at)


def _dispensable_first(row: View) -> tuple[int, float, float, str]:
    return (
        _ORDER.index(Condition(row["condition"])),
        -(row["idle_s"] or 0.0),
        -row["silent_s"],
        row["job"],
    )

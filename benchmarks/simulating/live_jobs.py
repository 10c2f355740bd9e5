"""Runs jobs that share one training group of a live embedded cluster, and reads their log.

A job's controller sleeps instead of a rollout on other GPUs, and then submits real operations on a
real model: `forward`, `forward_backward` and `optim_step` together, `sync_weights`.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Any

import numpy as np

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.wire.messages.views import LoggedOperationView, WaitingOperationView

VOCABULARY = "0123456789sr="
ROW_TOKENS = 48
ANSWER_S = 300.0
LOG_ROWS = 1000
"""Rows of a page of the operation log."""

ASK_S = 0.3

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """The parameters of one controller."""

    name: str
    rows: int
    """Rows of a mean batch."""
    hidden: int
    """Hidden size of the two-layer model."""
    rollout_s: float = 0.02
    """Mean of the lognormal rollout duration."""
    sigma: float = 0.2
    """Sigma of the logarithms of a rollout's seconds and of a batch's rows."""
    cycles: int = 8
    """Cycles that the controller runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The job views, the operation log and the final status of a run."""

    jobs: list[Plain]
    operations: list[Any]
    status: Plain
    """Of the cluster at the end."""
    explained: list[Any]
    """Answers of `explain` about waiting operations, asked every `ASK_S` during the run."""


def run_live(
    embedded: EmbeddedCluster, plans: Sequence[LiveJob], *, label: str, seed: int
) -> LiveRun:
    """Begin the jobs together, and run each for its cycles. All training shares one GPU: a job
    without work takes what is left.

    `label` is part of the job names, because the cluster reuses the profile of a job of the same
    name.
    """
    with plexrl.connect(embedded.url, embedded.api_key) as cluster, ExitStack() as stack:
        jobs = [stack.enter_context(cluster.create_job(f"{label}-{plan.name}")) for plan in plans]
        models = [plexrl.tiny_qwen2(VOCABULARY, hidden=plan.hidden) for plan in plans]
        # Rollouts and the idle job take their GPUs first, so that the remaining one is shared.
        if spare := int(cluster.status()["gpus"]) - len(plans) - 1:
            idle = stack.enter_context(cluster.create_job(f"{label}-idle"))
            model = plexrl.tiny_qwen2(VOCABULARY, hidden=32)
            layout = plexrl.Parallelism(dp=spare)
            idle.rollout_deployment("rollout", model, parallelism=layout).barrier().result(ANSWER_S)
        rollouts = [
            job.rollout_deployment("rollout", model)
            for job, model in zip(jobs, models, strict=True)
        ]
        for rollout in rollouts:
            rollout.barrier().result(ANSWER_S)
        actors = [
            job.train_deployment("actor", model) for job, model in zip(jobs, models, strict=True)
        ]
        for actor in actors:
            actor.barrier().result(ANSWER_S)
        begin, over = threading.Barrier(len(plans)), threading.Event()
        with ThreadPoolExecutor(len(plans) + 1) as pool:
            asked = pool.submit(_ask, jobs, over)
            controllers = [
                pool.submit(_control, plan, actor, rollout, begin, Random(f"{seed}:{plan.name}"))
                for plan, actor, rollout in zip(plans, actors, rollouts, strict=True)
            ]
            try:
                for controller in controllers:
                    controller.result()
            finally:
                over.set()
        names = {job.job: plan.name for job, plan in zip(jobs, plans, strict=True)}
        return LiveRun(
            jobs=[
                {**view, "name": names[view["job"]]}
                for view in cluster.jobs()
                if view["job"] in names
            ],
            operations=[row for job in jobs for row in operation_log(job)],
            status=dict(cluster.status()),
            explained=asked.result(),
        )


def _ask(jobs: Sequence[plexrl.Job], over: threading.Event) -> list[WaitingOperationView]:
    """Ask about the waiting operations of one job after the other until the run is over."""
    found: list[WaitingOperationView] = []
    for job in cycle(jobs):
        if over.wait(ASK_S):
            return found
        found += [row for row in job.explain()["operations"] if row["eta_low_s"] is not None]
    return found


def operation_log(job: plexrl.Job) -> list[LoggedOperationView]:
    """All rows of the job in the operation log."""
    rows: list[LoggedOperationView] = []
    while page := job.operations(after=rows[-1]["index"] if rows else 0, limit=LOG_ROWS):
        rows += page
    return rows


def _control(
    plan: LiveJob,
    actor: plexrl.TrainDeployment,
    rollout: plexrl.RolloutDeployment,
    begin: threading.Barrier,
    random: Random,
) -> None:
    loss = plexrl.losses.grpo()
    begin.wait(ANSWER_S)
    for _ in range(plan.cycles):
        rows = max(1, round(plan.rows * random.lognormvariate(0.0, plan.sigma)))
        batch = _batch(rows, random)
        time.sleep(plan.rollout_s * random.lognormvariate(-(plan.sigma**2) / 2, plan.sigma))
        actor.forward(batch).result(ANSWER_S)
        actor.forward_backward(batch, loss)
        actor.optim_step(learning_rate=1e-4).result(ANSWER_S)
        rollout.sync_weights(actor).result(ANSWER_S)


def _batch(rows: int, random: Random) -> plexrl.Batch:
    chance = np.random.default_rng(random.getrandbits(32))
    half = ROW_TOKENS // 2
    return plexrl.Batch.from_completions(
        chance.integers(3, 16, (rows, half)).tolist(),
        chance.integers(3, 16, (rows, half)).tolist(),
        logprobs=list(chance.normal(-2.5, 0.1, (rows, half))),
        advantages=list(np.repeat(chance.normal(size=(rows, 1)), half, axis=1)),
    )

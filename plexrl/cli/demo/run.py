"""Runs the demo: a cluster, both jobs on one shared group, each job alone, the report."""

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from plexrl.cli.demo.controllers import ControllerPlan, DemoController
from plexrl.cli.demo.measure import JobResult, PhaseResult, measure_phase
from plexrl.cli.demo.report import (
    DemoResult,
    same_weights,
    saving,
    saving_of_all_gpus,
    write_report,
)
from plexrl.cli.demo.view import DemoView, JobLine, Screen
from plexrl.cli.jobs.jobs import residencies
from plexrl.client.display.chrome_trace import operation_rows
from plexrl.errors import ExecutionError
from plexrl.model.parallelism import Parallelism
from plexrl.wire.messages.node_queries import CheckpointView
from plexrl.wire.messages.views import MetricsRow

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster
    from plexrl.wire.messages.views import LoggedOperationView

POLL_PERIOD_S = 0.3
CHECKPOINT = "final"
TASKS = (("sort", "alice"), ("reverse", "bob"))
"""Task and tenant of each job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `plexrl demo`."""

    out: Path = Path("out/demo")
    """Folder of the report."""
    steps: int = 150
    """RL steps of each job."""
    seed: int = 1
    workers: int = 2
    """Workers of a training group."""
    backend: str | None = None
    """Training backend; absent: the default."""
    layout: Parallelism | None = None
    """Parallel layout of a training group; absent: data parallel over `workers`."""
    isolated: bool = True
    """Whether to measure the isolated baseline."""

    @property
    def group_workers(self) -> int:
        """Workers of a training group."""
        return self.workers if self.layout is None else self.layout.world_size


def run_demo(options: DemoOptions, console: Console | None = None) -> DemoResult:
    """Run the whole demo and write its report.

    Raises:
        PlexRLError: a controller or the cluster failed; the message has the end of its log.
    """
    import plexrl
    from plexrl.cluster.embedded.start import start_embedded
    from plexrl.cluster.node.gpus import find_gpus

    console = console or Console()
    options.out.mkdir(parents=True, exist_ok=True)
    console.print("Starting the cluster: router, scheduler, StateManager, node agent …")
    wanted = options.group_workers + len(TASKS)
    kind = "gpus" if find_gpus().count >= wanted else "virtual_gpus"
    embedded = start_embedded(None, **{kind: wanted, "pin_workers": True})
    console.print(f"GPUs: {embedded.gpus}.")
    console.print(
        f"Watch both jobs while they run: {embedded.url}/dashboard   key: {embedded.api_key}",
        soft_wrap=True,
    )
    try:
        with plexrl.connect(embedded.url, embedded.api_key) as cluster:
            plans = [
                ControllerPlan(task=task, tenant=tenant, api_key=cluster.create_tenant(tenant))
                for task, tenant in TASKS
            ]
            _warm_up(cluster, options)
            phases = _Phases(cluster, embedded.url, options, embedded.data_dir / "logs", console)
            shared = phases.run("shared", [plans])
            isolated = (
                phases.run("isolated", [[plan] for plan in plans]) if options.isolated else None
            )
    finally:
        embedded.close()
    result = DemoResult(
        shared=shared,
        isolated=isolated,
        machine=f"{platform.machine()}, {_cores()} cores, {platform.system()}",
        versions=f"PlexRL {version('plexrl')}, torch {version('torch')}",
    )
    page = write_report(result, options.out)
    _print_summary(console, result, page)
    return result


def _warm_up(cluster: "Cluster", options: DemoOptions) -> None:
    """Load all libraries before the measurements."""
    import plexrl

    model = plexrl.tiny_qwen2("01")
    with cluster.create_job("warm-up") as job:
        actor = job.train_deployment(
            "actor",
            model,
            workers=options.group_workers,
            parallelism=options.layout,
            backend=options.backend,
        )
        rollout = job.rollout_deployment("rollout", model)
        for future in (actor.barrier(), rollout.barrier()):
            future.result()


class _Phases:
    """Runs phases on one cluster."""

    def __init__(
        self, cluster: "Cluster", url: str, options: DemoOptions, logs: Path, console: Console
    ) -> None:
        self._cluster = cluster
        self._url = url
        self._options = options
        self._logs = logs
        self._console = console

    def run(self, name: str, batches: Sequence[Sequence[ControllerPlan]]) -> PhaseResult:
        """Run the jobs of each batch together, and the batches one after the other."""
        results: list[JobResult] = []
        rows: list[LoggedOperationView] = []
        started_at = time.time()
        for plans in batches:
            after = max((row["index"] for row in operation_rows(self._cluster)), default=0)
            results += self._run_together(name, plans, started_at)
            rows += operation_rows(self._cluster, after=after)
        return measure_phase(name, results, rows)

    def _run_together(
        self, name: str, plans: Sequence[ControllerPlan], started_at: float
    ) -> list[JobResult]:
        known = {str(job["job"]) for job in self._cluster.jobs()}
        lines = [JobLine(name=plan.task, tenant=plan.tenant) for plan in plans]
        screen = Screen(title=f"{name} group", started_at=started_at, jobs=lines)
        controllers = [self._start(name, plan) for plan in plans]
        try:
            with DemoView(self._console) as view:
                while any(controller.is_running() for controller in controllers):
                    self._refresh(screen, known)
                    view.show(screen)
                    time.sleep(POLL_PERIOD_S)
                self._refresh(screen, known)
        finally:
            for controller in controllers:
                controller.stop()
        return [self._result(line) for line in lines]

    def _start(self, phase: str, plan: ControllerPlan) -> DemoController:
        options = self._options
        arguments = [
            *("--steps", str(options.steps), "--seed", str(options.seed)),
            *("--workers", str(options.group_workers), "--name", plan.task),
            *("--save", CHECKPOINT),
        ]
        if options.backend is not None:
            arguments += ["--backend", options.backend]
        if options.layout is not None:
            sizes = asdict(options.layout).items()
            arguments += ["--layout", ",".join(f"{axis}={size}" for axis, size in sizes)]
        if phase == "isolated":
            arguments.append("--exclusive")
        return DemoController(
            plan,
            url=self._url,
            arguments=arguments,
            log_path=self._logs / f"{phase}-{plan.task}.log",
        )

    def _refresh(self, screen: Screen, known: set[str]) -> None:
        """Update `screen` from the cluster."""
        jobs = [job for job in self._cluster.jobs() if job["job"] not in known]
        for line in screen.jobs:
            for job in jobs:
                if job["name"] == line.name and job["tenant"] == line.tenant:
                    line.job = job["job"]
                    line.state = job["state"].lower()
                    line.residency = residencies(job)
                    line.gpus |= {
                        (str(rank["node"]), int(rank["gpu"]))
                        for deployment in job["deployments"]
                        for rank in deployment["ranks"]
                    }
            if line.job is not None:
                _read_metrics(line, self._cluster.attach_job(line.job, heartbeat=False).metrics())
        screen.groups = [group for group in self._cluster.groups() if len(group["gpus"]) > 1]

    def _result(self, line: JobLine) -> JobResult:
        if line.job is None or line.reward_before is None or line.reward_after is None:
            raise ExecutionError(f"the job {line.name!r} ended without reporting its rewards")
        job = next(job for job in self._cluster.jobs() if job["job"] == line.job)
        assert job["ended_at"] is not None, "its controller has ended it"
        reader = self._cluster.attach_job(line.job, heartbeat=False)
        rows = reader.metrics()
        train = next(d for d in job["deployments"] if d["kind"] == "train")
        return JobResult(
            name=line.name,
            tenant=line.tenant,
            job=line.job,
            submitted_at=job["submitted_at"],
            ended_at=job["ended_at"],
            train_deployment=str(train["deployment"]),
            workers=int(train["workers"]),
            steps=line.step,
            reward_before=line.reward_before,
            reward_after=line.reward_after,
            gpus=frozenset(line.gpus),
            rewards=tuple(
                (int(row["step"]), float(row["time"]) - float(job["submitted_at"]), value)
                for row in rows
                if (value := row["values"].get("reward/mean")) is not None
            ),
            weights=digest_of(reader.checkpoints()),
        )


def digest_of(checkpoints: Sequence[CheckpointView]) -> str:
    """SHA-256 of the weights of the final checkpoint.

    Raises:
        ExecutionError: there is no such checkpoint, or no weights in it: nothing, which is equal to
            nothing, must not count as equal weights.
    """
    folders = [Path(found["path"]) for found in checkpoints if found["name"] == CHECKPOINT]
    files = sorted(path for folder in folders for path in folder.glob("*.safetensors"))
    if not files:
        raise ExecutionError(f"no weights to compare: the checkpoint {CHECKPOINT!r} has no files")
    digest = sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_metrics(line: JobLine, rows: Sequence[MetricsRow]) -> None:
    line.rewards = [row["values"]["reward/mean"] for row in rows if "reward/mean" in row["values"]]
    line.step = len(line.rewards)
    evaluations = [row["values"] for row in rows if "eval/reward" in row["values"]]
    if evaluations:
        line.reward_before = evaluations[0]["eval/reward"]
        line.steps = int(evaluations[0]["steps"])
    if len(evaluations) > 1:
        line.reward_after = evaluations[-1]["eval/reward"]


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _print_summary(console: Console, result: DemoResult, page: Path) -> None:
    from rich.table import Table

    table = Table(title="Two RL jobs on one shared training group", title_justify="left", box=None)
    for column in ("job", "tenant", "steps", "reward before", "after"):
        table.add_column(column, justify="left" if column in ("job", "tenant") else "right")
    for job in result.shared.jobs:
        table.add_row(
            job.name,
            job.tenant,
            str(job.steps),
            f"{job.reward_before:.3f}",
            f"{job.reward_after:.3f}",
        )
    console.print(table)
    shared, isolated = result.shared, result.isolated
    console.print(
        f"shared: {shared.gpu_seconds_per_step:.3f} reserved GPU-seconds per step on {shared.gpus} "
        f"GPUs, {shared.context_switches} context switches in {shared.switch_seconds:.2f} s",
        soft_wrap=not console.is_terminal,
    )
    if isolated is not None:
        console.print(
            f"isolated: {isolated.gpu_seconds_per_step:.3f} on {isolated.gpus} GPUs; sharing saves "
            f"{100 * saving_of_all_gpus(shared, isolated):.0f} % of training and rollout GPUs, "
            f"{100 * saving(shared, isolated):.0f} % of the training GPUs",
            soft_wrap=not console.is_terminal,
        )
        same = same_weights(shared, isolated)
        console.print(
            f"final weights of both jobs: {'identical to' if same else 'NOT those of'} each alone"
        )
    console.print(f"report: {page}", soft_wrap=True)

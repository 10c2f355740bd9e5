"""`plexrl demo --paced`: tenants with a published profile share a training pool, on a laptop.

The cluster, the scheduler, the StateManager and the controllers are real; the GPUs are paced: each
step sleeps as long as the published one, scaled. Every figure and table of the report says so.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np
from rich.console import Console

from plexrl.cli.demo.measure import JobResult, PhaseResult, Row, measure_phase
from plexrl.cli.demo.report import plot_timeline
from plexrl.client.display.chrome_trace import operation_rows
from plexrl.errors import DeadlineExceededError, ExecutionError
from plexrl.latency.pace import parse_pace
from plexrl.traces.generate.published import MODEL_CLASSES

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster
    from plexrl.client.blocking.job import Job

PROMPTS, SAMPLES, TOKENS = 8, 4, 64
"""Prompts of a step, samples of each, and tokens of the longest. The profile gives the times,
whatever these are."""
READY_S = 300.0
"""Real seconds in which the workers of all tenants are ready, or the demo fails."""

SAVED = ("training_modelled_gpu_hours_per_step", "modelled_gpu_hours_per_step")
"""The figures of which the report says what part sharing saves."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedOptions:
    """The options of `plexrl demo --paced`."""

    out: Path = Path("out/demo")
    tenants: int = 2
    steps: int = 8
    seed: int = 1
    profile: str = "7B"
    """A published profile (PlexRL Tab. 1), with its GPUs."""
    scale: float = 0.01
    """Real seconds for each modelled second."""

    @property
    def pace(self) -> str:
        """The pace of all workers."""
        return f"published:{self.profile.lower()}@{self.scale:g}"


@dataclass(frozen=True, slots=True)
class Start:
    """Synchronises tenants that run together."""

    ready: threading.Barrier
    """Passed when the workers of all are ready."""
    placing: threading.Lock = field(default_factory=threading.Lock)
    """Held by the tenant that creates its deployments: a second training would take the GPUs that
    the first tenant's rollout is about to ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedFigures:
    """One mode, paced. Modelled time is real time divided by the scale."""

    drain_real_s: float
    """Seconds from when all workers are ready to the last end; isolated, of the longest job."""
    drain_modelled_s: float
    training_modelled_gpu_hours_per_step: float
    modelled_gpu_hours_per_step: float
    """With the rollouts' GPUs, which are reserved for the duration of their job."""
    busy_share: float
    context_switches: int


class PacedReport(TypedDict):
    """The figures of both modes, as `paced.json` has them."""

    paced: bool
    pace: str
    tenants: int
    steps: int
    gpus_of_a_training: int
    gpus_of_a_rollout: int
    shared: dict[str, float]
    """The fields of `PacedFigures`, as in `isolated`."""
    isolated: dict[str, float]
    same_results: bool
    """All samples, logprobs and steps are identical in both modes."""
    saved_training_modelled_gpu_hours_per_step: float
    """Part of the isolated GPU-hours that sharing saves."""
    saved_modelled_gpu_hours_per_step: float


def run_paced_demo(options: PacedOptions, console: Console) -> PacedReport:
    """Run the tenants together and each alone; write `paced.html` and `paced.json`.

    Raises:
        InvalidRequestError: the profile or the scale is invalid.
        PlexRLError: the cluster or a job failed, or the tenants did not share one group.
    """
    import plexrl
    from plexrl.cluster.embedded.start import start_embedded

    parse_pace(options.pace)
    profile = MODEL_CLASSES[options.profile.upper()]
    console.print(f"Starting a cluster of paced GPUs ({options.pace}) …")
    gpus = profile.gpus + options.tenants * profile.rollout_gpus
    embedded = start_embedded(None, virtual_gpus=gpus)
    try:
        with plexrl.connect(embedded.url, embedded.api_key) as cluster:
            tenants = range(options.tenants)
            shared, drawn = _run(cluster, options, "shared", tenants)
            check_shared(shared)
            console.print("paced, shared: done; now each tenant alone …")
            alone = [_run(cluster, options, "isolated", [tenant]) for tenant in tenants]
    finally:
        embedded.close()
    together = asdict(_figures(options, [shared]))
    apart = asdict(_figures(options, [phase for phase, _ in alone]))
    training, whole = (1.0 - together[name] / apart[name] for name in SAVED)
    found: PacedReport = {
        "paced": True,
        "pace": options.pace,
        "tenants": options.tenants,
        "steps": options.steps,
        "gpus_of_a_training": profile.gpus,
        "gpus_of_a_rollout": profile.rollout_gpus,
        "shared": together,
        "isolated": apart,
        "same_results": drawn == {name: one for _, each in alone for name, one in each.items()},
        "saved_training_modelled_gpu_hours_per_step": training,
        "saved_modelled_gpu_hours_per_step": whole,
    }
    page = _write(options.out, found, shared)
    _print(console, found, page)
    return found


def _run(
    cluster: "Cluster", options: PacedOptions, name: str, tenants: Sequence[int]
) -> tuple[PhaseResult, dict[str, str]]:
    """Run these tenants' jobs together; also returns what each of them drew and learnt."""
    after = max((row["index"] for row in operation_rows(cluster)), default=0)

    def work(tenant: int, start: Start) -> tuple[JobResult, str]:
        title = f"tenant-{tenant + 1}"
        with cluster.create_job(title) as job:
            began_at, results = _train(job, options, tenant, start)
        view = next(each for each in cluster.jobs() if each["job"] == job.job)
        train = next(
            deployment for deployment in view["deployments"] if deployment["kind"] == "train"
        )
        assert view["ended_at"] is not None, "the block has ended the job"
        result = JobResult(
            name=title,
            tenant=title,
            job=job.job,
            submitted_at=began_at,
            ended_at=view["ended_at"],
            train_deployment=str(train["deployment"]),
            workers=int(train["workers"]),
            steps=options.steps,
            reward_before=0.0,
            reward_after=0.0,
            rewards=(),
        )
        return result, results

    found = run_together(tenants, work)
    jobs = [job for job, _ in found]
    began_at = min(job.submitted_at for job in jobs)
    phase = measure_phase(name, jobs, rows_since(operation_rows(cluster, after=after), began_at))
    return phase, {job.name: results for job, results in found}


def run_together(
    tenants: Sequence[int],
    work: Callable[[int, Start], T],
    *,
    ready_s: float = READY_S,
) -> list[T]:
    """The results of `work` of all tenants, each in a thread of its own.

    Raises:
        DeadlineExceededError: some were not ready within `ready_s`.
        Exception: as `work` of the first tenant that failed.
    """
    start = Start(threading.Barrier(len(tenants), timeout=ready_s))

    def run(tenant: int) -> T:
        try:
            return work(tenant, start)
        except BaseException:
            # The others would wait for this one.
            start.ready.abort()
            raise

    with ThreadPoolExecutor(len(tenants)) as pool:
        running = [pool.submit(run, tenant) for tenant in tenants]
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise DeadlineExceededError(
            f"not all tenants' workers were ready within {ready_s:g} s: look at `plexrl jobs`, or "
            "run the demo on a machine with less to do"
        ) from errors[0]
    return [each.result() for each in running]


def check_shared(phase: PhaseResult) -> None:
    """Raises `ExecutionError` if the trainings of a shared phase were on several groups, or on
    none: its figures would show no sharing."""
    if phase.groups != 1:
        raise ExecutionError(
            f"the paced tenants trained on {phase.groups} groups of GPUs, not on one, so there is "
            "nothing to report: run the demo again"
        )


def rows_since(rows: Iterable[Row], began_at: float) -> list[Row]:
    """The operations that began at `began_at`, when all workers were ready, or later: the first
    loads of the tenants' models are not a part of what is measured."""
    began = [row for row in rows if row["started_at"] is not None]
    return [row for row in began if row["started_at"] >= began_at]


def _train(job: "Job", options: PacedOptions, tenant: int, start: Start) -> tuple[float, str]:
    """One job; returns the time when all tenants' workers were ready, because the start of
    processes is not scaled, and a digest of its samples, logprobs and steps."""
    import hashlib

    import plexrl

    profile = MODEL_CLASSES[options.profile.upper()]
    model = plexrl.tiny_qwen2("0123456789", seed=options.seed + tenant)
    with start.placing:
        actor = job.train_deployment("actor", model, workers=profile.gpus, pace=options.pace)
        rollout = job.rollout_deployment(
            "rollout",
            model,
            parallelism=plexrl.Parallelism(dp=profile.rollout_gpus),
            pace=options.pace,
        )
    for ready in (actor.barrier(), rollout.barrier()):
        ready.result(READY_S)
    start.ready.wait()
    began_at = time.time()
    digest = hashlib.sha256()
    for step in range(options.steps):
        prompts = [[3 + (step + each) % 10] * 4 for each in range(PROMPTS)]
        sampling = plexrl.SamplingParams(max_tokens=TOKENS, seed=options.seed + step)
        samples = rollout.generate(prompts, n=SAMPLES, sampling=sampling).result().samples
        scores = [[len(each.tokens) / TOKENS - 0.5 for each in group] for group in samples]
        batch = plexrl.Batch.from_samples(prompts, samples, np.array(scores))
        logprobs = actor.forward(batch)
        actor.forward_backward(batch, plexrl.losses.grpo())
        done = actor.optim_step(learning_rate=1e-2)
        rollout.sync_weights(actor).result()
        digest.update(repr([[each.tokens for each in group] for group in samples]).encode())
        digest.update(np.concatenate(logprobs.result().logprobs).tobytes())
        digest.update(repr(done.result().metrics).encode())
    return began_at, digest.hexdigest()


def _figures(options: PacedOptions, phases: Sequence[PhaseResult]) -> PacedFigures:
    """The figures of a mode: of one shared run, or of the runs of all tenants alone."""
    rollout_gpus = MODEL_CLASSES[options.profile.upper()].rollout_gpus
    jobs = [job for phase in phases for job in phase.jobs]
    steps = options.steps * len(jobs)
    training_s = sum(phase.worker_seconds for phase in phases) / options.scale
    rollouts_s = sum(rollout_gpus * (job.ended_at - job.submitted_at) for job in jobs)
    busy_s = sum(phase.busy_share * phase.worker_seconds for phase in phases) / options.scale
    drain_s = max(phase.wall_seconds for phase in phases)
    return PacedFigures(
        drain_real_s=drain_s,
        drain_modelled_s=drain_s / options.scale,
        training_modelled_gpu_hours_per_step=training_s / steps / 3600,
        modelled_gpu_hours_per_step=(training_s + rollouts_s / options.scale) / steps / 3600,
        busy_share=busy_s / training_s if training_s else 0.0,
        context_switches=sum(phase.context_switches for phase in phases),
    )


def _write(folder: Path, found: PacedReport, shared: PhaseResult) -> Path:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "paced.json").write_text(json.dumps(found, indent=2) + "\n")
    plot_timeline(shared, folder / "paced.png", label="paced: ")
    environment = Environment(
        loader=PackageLoader("plexrl.cli.demo"), autoescape=True, undefined=StrictUndefined
    )
    page = folder / "paced.html"
    page.write_text(environment.get_template("paced.html.j2").render(found=found))
    return page


def _print(console: Console, found: PacedReport, page: Path) -> None:
    from rich.table import Table

    table = Table(title=f"Paced ({found['pace']})", title_justify="left", box=None)
    for column in ("paced", "shared", "isolated"):
        table.add_column(column, justify="left" if column == "paced" else "right")
    for name, shared in found["shared"].items():
        table.add_row(name.replace("_", " "), f"{shared:.2f}", f"{found['isolated'][name]:.2f}")
    console.print(table)
    training = found["saved_training_modelled_gpu_hours_per_step"]
    whole = found["saved_modelled_gpu_hours_per_step"]
    same = "are identical" if found["same_results"] else "DIFFER"
    console.print(
        f"paced: sharing saves {100 * training:.0f} % of the modelled training GPU-hours per step, "
        f"{100 * whole:.0f} % of all; results {same}",
        soft_wrap=not console.is_terminal,
    )
    console.print(f"report: {page}", soft_wrap=True)

"""The options of `plexrl simulate-rollout`, and the questions that they ask."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from plexrl.sim.rollout.setting import Setting, System

R1_LONG_SCALE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """Prompts and responses."""

    PANEL: ClassVar = "Responses"

    lengths: Annotated[str, typer.Option(help="r1-long, r1, or a trace of response lengths.")] = (
        "r1-long"
    )
    scale: Annotated[
        float | None,
        typer.Option(help="Factor on lengths; default: 1.25 of r1-long, 1 of others."),
    ] = None
    limit: Annotated[
        str, typer.Option(help="Longest responses in tokens, with commas between.")
    ] = "40000"
    correlation: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Correlation of the lengths of one prompt, if the trace has no groups.",
        ),
    ] = 0.9
    group_size: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 16
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The cluster."""

    PANEL: ClassVar = "The cluster"

    gpus: Annotated[int, typer.Option(min=2, help="GPUs for rollout and training.")] = 128
    rollout_gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs that roll out; default: the best number of each system."),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Prompts per training step.")] = 128
    costs: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of latencies and KV cache (docs/simulating_rollouts.md); default: "
            "Qwen3-30B-A3B on H20."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """The systems."""

    PANEL: ClassVar = "Systems"

    system: Annotated[
        str,
        typer.Option(
            help="sync, one-step, inflight, inflight-rebalanced, inflight-loose, staleflow, "
            "with commas between."
        ),
    ] = "sync,one-step,inflight,staleflow"
    staleness: Annotated[str, typer.Option(help="Staleness bounds, with commas between.")] = "1,2,3"
    ablation: Annotated[
        bool,
        typer.Option("--ablation", help="Also run staleflow with vanilla strategies."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The runs."""

    PANEL: ClassVar = "Runs"

    steps: Annotated[int, typer.Option(min=1, help="Training steps of a run.")] = 16
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="First steps that throughput leaves out.")
    ] = 4
    cycle_s: Annotated[
        float, typer.Option(help="Seconds between two snapshots of the coordinator.")
    ] = 5.0
    seed: Annotated[int, typer.Option(help="Seed of the lengths.")] = 0
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: one per core.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and report.html.")] = (
        None
    )


def settings(
    responses: ResponseOptions, cluster: ClusterOptions, running: RunOptions
) -> "list[Setting]":
    """One setting per limit.

    Raises:
        InvalidRequestError: an option is invalid, or a file cannot be read.
    """
    from plexrl.sim.rollout.engine.costs import QWEN3_30B_A3B, read_costs
    from plexrl.sim.rollout.setting import Setting
    from plexrl.sim.rollout.workload import R1_LONG, Prompts, Workload

    scale = responses.scale
    if scale is None:
        scale = R1_LONG_SCALE if responses.lengths == R1_LONG else 1.0
    found = [
        Setting(
            gpus=cluster.gpus,
            batch_groups=cluster.batch,
            costs=QWEN3_30B_A3B if cluster.costs is None else read_costs(cluster.costs),
            workload=Workload(
                lengths=responses.lengths,
                scale=scale,
                limit=limit,
                correlation=responses.correlation,
                group_size=responses.group_size,
                prompt_tokens=responses.prompt_tokens,
                seed=running.seed,
            ),
            steps=running.steps,
            warmup_steps=running.warmup_steps,
            cycle_s=running.cycle_s,
        )
        for limit in _numbers("--limit", responses.limit)
    ]
    # A trace that cannot be read is found before anything runs.
    Prompts(found[0].workload)
    return found


def systems(options: SystemOptions, rollout_gpus: int | None) -> "list[System]":
    """The systems in the order of the options.

    Raises:
        InvalidRequestError: a name or a bound is invalid.
    """
    from plexrl.sim.rollout.setting import BOUNDED, SPLIT, Strategies, System, SystemName

    bounds = _numbers("--staleness", options.staleness)
    found = []
    for text in options.system.split(","):
        try:
            name = SystemName(text.strip())
        except ValueError as error:
            names = ", ".join(each.value for each in SystemName)
            raise InvalidRequestError(f"--system {text!r}: use {names}") from error
        gpus = (rollout_gpus or 0) if name in SPLIT else 0
        fixed = {SystemName.SYNC: [0], SystemName.ONE_STEP: [1]}
        strategies = [Strategies()]
        if name == SystemName.STALEFLOW and options.ablation:
            flags = sorted(product((False, True), repeat=3), key=sum)
            strategies = [
                Strategies(routing=routing, synchronization=synchronization, migration=migration)
                for routing, synchronization, migration in flags
            ]
        found += [
            System(name=name, staleness=bound, rollout_gpus=gpus, strategies=each)
            for bound in (bounds if name in BOUNDED else fixed[name])
            for each in strategies
        ]
    return list(dict.fromkeys(found))


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError(
            f"{option} {text}: give whole numbers with commas between"
        ) from error
    if min(found) < 0:
        raise InvalidRequestError(f"{option} {text}: give numbers of at least 0")
    return list(dict.fromkeys(found))

"""The options of `plexrl simulate-rollout`, and the questions that they ask."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from plexrl.client.data.rollout_policy import OVER_LAUNCH
from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from plexrl.latency.costs import EngineCosts
    from plexrl.latency.models import Model
    from plexrl.sim.rollout.setting import Setting, System, SystemName

R1_LONG_SCALE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """Prompts and responses."""

    PANEL: ClassVar = "Responses"

    lengths: Annotated[
        str, typer.Option(help="r1-long, r1, deepscaler, or a trace of response lengths.")
    ] = "r1-long"
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
    rewards: Annotated[
        str,
        typer.Option(
            help="at-once, or mixed: 2 s each, and 30 s for one prompt of 60. Only sync, tail and "
            "flexes know rewards that take time."
        ),
    ] = "at-once"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutClusterOptions:
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
    model: Annotated[
        str | None,
        typer.Option(
            help="qwen2.5-7b, -14b, -32b, -72b, llama3.1-8b or qwen3-14b, in place of --costs."
        ),
    ] = None
    gpu_type: Annotated[
        str | None, typer.Option(help="GPUs of --model: h800 (default), h100, h20 or a40.")
    ] = None
    critic: Annotated[
        bool,
        typer.Option("--critic", help="Training of --model has a critic of the same size, as PPO."),
    ] = False
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of an instance of --model.")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """The systems."""

    PANEL: ClassVar = "Systems"

    system: Annotated[
        str,
        typer.Option(
            help="sync, staleflow, tail, flexes, streamrl-skew, streamrl-sync, streamrl-async, "
            "pat, with commas between."
        ),
    ] = "sync,staleflow"
    staleness: Annotated[str, typer.Option(help="Staleness bounds, with commas between.")] = "1,2,3"
    ablation: Annotated[
        bool,
        typer.Option(
            "--ablation",
            help="Also run staleflow with vanilla strategies, and flexes without some of its "
            "parts.",
        ),
    ] = False
    over_launch: Annotated[
        float,
        typer.Option(
            help="How many times the trained prompts, and responses to each, short rounds of tail "
            "and flexes start at most."
        ),
    ] = OVER_LAUNCH
    fixed_over_launch: Annotated[
        bool,
        typer.Option(
            "--fixed-over-launch",
            help="Short rounds always start --over-launch times as many, as in Flexes.",
        ),
    ] = False
    recall: Annotated[
        float,
        typer.Option(
            help="Part of the longest fifth of the prompts that the ranks of streamrl-* find: 0.2 "
            "at random, 1 if lengths are known; default: that of PlexRL's ranker."
        ),
    ] = 0.71
    ends: Annotated[
        str,
        typer.Option(
            help="Where pat expects responses to end: projected from earlier ones, at the limit "
            "as in the paper, or known, an oracle."
        ),
    ] = "projected"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRunOptions:
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
    responses: ResponseOptions, cluster: RolloutClusterOptions, running: RolloutRunOptions
) -> "list[Setting]":
    """One setting per limit.

    Raises:
        InvalidRequestError: an option is invalid, or a file cannot be read.
    """
    from plexrl.sim.rollout.engine.rewards import AT_ONCE, MIXED
    from plexrl.sim.rollout.setting import Setting
    from plexrl.sim.rollout.workload import R1_LONG, Prompts, RolloutWorkload

    scale = responses.scale
    if scale is None:
        scale = R1_LONG_SCALE if responses.lengths == R1_LONG else 1.0
    rewards = {"at-once": AT_ONCE, "mixed": MIXED}
    if responses.rewards not in rewards:
        raise InvalidRequestError(f"--rewards {responses.rewards!r}: use {' or '.join(rewards)}")
    model, costs = engine(cluster)
    found = [
        Setting(
            gpus=cluster.gpus,
            batch_groups=cluster.batch,
            costs=costs,
            model=model,
            rewards=rewards[responses.rewards],
            workload=RolloutWorkload(
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
        for limit in numbers("--limit", responses.limit)
    ]
    # A trace that cannot be read is found before anything runs.
    Prompts(found[0].workload)
    return found


def engine(cluster: RolloutClusterOptions) -> "tuple[Model | None, EngineCosts]":
    """The model, if there is one, and latencies. Raises InvalidRequestError: they do not exist."""
    from plexrl.latency.costs import QWEN3_30B_A3B, read_costs
    from plexrl.latency.gpus import GPUS
    from plexrl.latency.models import MODELS, PPO_OPERATIONS

    if cluster.model is None:
        if cluster.tensor_parallel != 1 or cluster.critic or cluster.gpu_type:
            raise InvalidRequestError(
                "--tensor-parallel, --gpu-type and --critic are of --model: give a model"
            )
        return None, QWEN3_30B_A3B if cluster.costs is None else read_costs(cluster.costs)
    if cluster.costs is not None:
        raise InvalidRequestError("--model and --costs both give latencies: give one")
    if cluster.model not in MODELS:
        raise InvalidRequestError(f"--model {cluster.model!r}: use {', '.join(MODELS)}")
    model = MODELS[cluster.model]
    if cluster.gpu_type is not None:
        if cluster.gpu_type not in GPUS:
            raise InvalidRequestError(f"--gpu-type {cluster.gpu_type!r}: use {', '.join(GPUS)}")
        model = replace(model, gpu=GPUS[cluster.gpu_type])
    if cluster.critic:
        model = replace(model, train_operations=PPO_OPERATIONS)
    return model, model.costs(cluster.tensor_parallel)


def systems(options: SystemOptions, rollout_gpus: int | None) -> "list[System]":
    """The systems in the order of the options.

    Raises:
        InvalidRequestError: a name or a bound is invalid.
    """
    from plexrl.sim.rollout.setting import FIXED_STALENESS, SPLIT, Ends, SystemName

    bounds = numbers("--staleness", options.staleness)
    if options.ends not in tuple(Ends):
        raise InvalidRequestError(f"--ends {options.ends!r}: use {', '.join(Ends)}")
    ends = Ends(options.ends)
    found = []
    for text in options.system.split(","):
        try:
            name = SystemName(text.strip())
        except ValueError as error:
            names = ", ".join(each.value for each in SystemName)
            raise InvalidRequestError(f"--system {text!r}: use {names}") from error
        gpus = (rollout_gpus or 0) if name in SPLIT else 0
        found += [
            replace(
                variant,
                staleness=bound,
                rollout_gpus=gpus,
                over_launch_prompts=options.over_launch,
                over_launch_responses=options.over_launch,
                fixed_over_launch=options.fixed_over_launch,
                recall=options.recall,
                ends=ends if name == SystemName.PAT else Ends.PROJECTED,
            )
            for bound in ([FIXED_STALENESS[name]] if name in FIXED_STALENESS else bounds)
            for variant in _variants(name, ablation=options.ablation)
        ]
    return list(dict.fromkeys(found))


def _variants(name: "SystemName", *, ablation: bool) -> "list[System]":
    """The system, after those with fewer strategies or parts if there is an ablation."""
    from plexrl.sim.rollout.setting import FIXED_STALENESS, Parts, Strategies, System, SystemName

    plain = System(name=name, staleness=FIXED_STALENESS.get(name, 0))
    if not ablation:
        return [plain]
    if name == SystemName.STALEFLOW:
        flags = sorted(product((False, True), repeat=3), key=sum)
        return [
            replace(
                plain,
                strategies=Strategies(
                    routing=routing, synchronization=synchronization, migration=migration
                ),
            )
            for routing, synchronization, migration in flags
        ]
    if name == SystemName.FLEXES:
        # In the order of Flexes Tab. 2 after `tail`, then what is left without tail batching.
        fewer = (
            Parts(parallelism=False, stream=False),
            Parts(stream=False),
            Parts(tail=False, parallelism=False, stream=False),
            Parts(tail=False, parallelism=False),
            Parts(),
        )
        return [replace(plain, parts=each) for each in fewer]
    return [plain]


def numbers(option: str, text: str) -> list[int]:
    """The numbers of an option, each once. Raises InvalidRequestError: it has others."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError(
            f"{option} {text}: give whole numbers with commas between"
        ) from error
    if min(found) < 0:
        raise InvalidRequestError(f"{option} {text}: give numbers of at least 0")
    return list(dict.fromkeys(found))

"""`plexrl allocate-rollout`: how many GPUs, and which, for generation and for training."""

from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.simulate_rollout.options import (
    ResponseOptions,
    RolloutClusterOptions,
    RolloutRunOptions,
    settings,
)
from plexrl.cli.terminal.context import Json, print_table, write_json
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plexrl.sim.rollout.plan.allocation import AllocationChoice, GpuPool


@with_option_groups
def allocate_rollout(
    pool: Annotated[
        list[str],
        typer.Argument(
            help="GPUs that can be had: KIND=COUNT, or KIND=COUNT@PRICE with the price of one "
            "(default: h20 1, h800 2.85), such as h800=32 h20=32."
        ),
    ],
    responses: ResponseOptions,
    *,
    model: Annotated[
        str, typer.Option(help="As simulate-rollout --model.", rich_help_panel="The job")
    ] = "qwen2.5-7b",
    batch: Annotated[
        int, typer.Option(min=1, help="Prompts per step.", rich_help_panel="The job")
    ] = 64,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs of an instance.", rich_help_panel="The job")
    ] = 1,
    trainer_gpus: Annotated[
        int,
        typer.Option(min=1, help="GPUs of a replica of the trainer.", rich_help_panel="The job"),
    ] = 8,
    step_s: Annotated[
        float | None,
        typer.Option(
            help="Longest step of the allocation with the least cost; default: that of the slowest "
            "other one.",
            rich_help_panel="The job",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """How many GPUs, and which, for generation and for training, so that both take equally long."""
    from plexrl.sim.rollout.plan.allocation import choices

    pools = _pools(pool)
    cluster = RolloutClusterOptions(
        gpus=sum(pool.kind.gpus for pool in pools.values()),
        batch=batch,
        model=model,
        tensor_parallel=tensor_parallel,
    )
    (setting,) = settings(responses, cluster, RolloutRunOptions())[:1]
    found = choices(
        setting,
        pools,
        instance_gpus=tensor_parallel,
        trainer_gpus=trainer_gpus,
        step_s_max=step_s,
    )
    if as_json:
        write_json({"model": model, "allocations": [_values(each) for each in found]})
    else:
        _show(found)


def _pools(texts: "Sequence[str]") -> "dict[str, GpuPool]":
    """The pools by the name of their kind. Raises InvalidRequestError: a text is none."""
    from plexrl.latency.gpus import GPUS
    from plexrl.rollout.policies.allocation import GpuKind
    from plexrl.sim.rollout.plan.allocation import PRICES, GpuPool

    found: dict[str, GpuPool] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        count, _, price = rest.partition("@")
        if name not in GPUS or name in found:
            raise InvalidRequestError(f"{text!r}: use each of {', '.join(GPUS)} once at most")
        if not price and name not in PRICES:
            raise InvalidRequestError(f"{text!r}: the price is not known: give {text}@PRICE")
        try:
            kind = GpuKind(gpus=int(count), price=float(price) if price else PRICES[name])
        except ValueError as error:
            raise InvalidRequestError(f"{text!r}: give KIND=COUNT or KIND=COUNT@PRICE") from error
        found[name] = GpuPool(gpu=GPUS[name], kind=kind)
    return found


def _values(each: "AllocationChoice") -> dict[str, object]:
    found, allocation = each.found, each.found.allocation
    return {
        "way": each.way,
        "generation": found.generation,
        "training": found.training,
        "instances": allocation.instances,
        "trainers": allocation.trainers,
        "gpus": allocation.gpus,
        "generation_s": allocation.generation_s,
        "training_s": allocation.training_s,
        "step_s": allocation.iteration_s,
        "price": found.price,
        "samples_per_s": each.samples / allocation.iteration_s,
        "samples_per_cost": each.samples_per_cost,
    }


def _show(found: "Sequence[AllocationChoice]") -> None:
    first = found[0].samples_per_cost
    rows = [
        (
            each.way,
            f"{each.found.allocation.instances} on {each.found.generation}",
            f"{each.found.allocation.trainers} on {each.found.training}",
            f"{each.found.allocation.gpus}",
            f"{each.found.allocation.generation_s:.0f}",
            f"{each.found.allocation.training_s:.0f}",
            f"{each.found.price:.1f}",
            f"{each.samples_per_cost / first:.2f}",
        )
        for each in found
    ]
    head = ("", "instances", "trainers", "GPUs", "gen. s", "train. s", "price", "by cost")
    print_table("", head, rows)

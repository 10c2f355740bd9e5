"""`plexrl rollouts`: asynchronous rollouts, their buffers and instances."""

from collections.abc import Sequence
from typing import Annotated

import typer

from plexrl.cli.terminal.context import Access, Cells, Output, print_line, write_text
from plexrl.cli.terminal.job_ids import find_job
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import InvalidRequestError
from plexrl.wire.messages.rollout_views import InstanceView, RolloutStatus


class _InstanceRow(InstanceView):
    """An instance with the rollout that it belongs to."""

    name: str
    of: RolloutStatus


@with_option_groups
def rollouts(
    job: Annotated[
        str | None,
        typer.Argument(help="Only this job's: its id, a prefix of it, or its name."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Print the profile of the job's rollout NAME, for plan-rollout."
        ),
    ] = None,
    *,
    access: Access,
    output: Output,
) -> None:
    """Asynchronous rollouts: how far generation is ahead of training, and the load of instances."""
    with access.open() as cluster:
        if profile is not None:
            if job is None:
                raise InvalidRequestError("--profile is of one job's rollout: name the job, too")
            write_text(find_job(cluster, job).rollout_profile(profile).to_json() + "\n")
            return
        found = cluster.rollouts(None if job is None else find_job(cluster, job).job)
    show(found, output)


def show(found: Sequence[RolloutStatus], output: Output) -> None:
    """Print rollouts as the cluster describes them."""
    cells: Cells = {
        "job": "job",
        "rollout": "name",
        "state": "state",
        "η": "staleness",
        "version": "newest_version",
        "ready": "batches_ready",
        "in flight": lambda each: f"{each['in_flight']} of {each['in_flight_max']}",
        "ages": lambda each: shares(each["staleness_seen"]),
        "tokens/s": lambda each: f"{each['tokens_per_s']:.0f}",
    }
    output.table(cells, found)
    if output.as_json or not found:
        return
    instances: list[_InstanceRow] = [
        {**each, "name": name, "of": view}
        for view in found
        for name, each in view["instances"].items()
    ]
    columns: Cells = {
        **({"job": lambda each: each["of"]["job"]} if len({v["job"] for v in found}) > 1 else {}),
        **{field: field for field in ("name", "state", "version", "running", "waiting")},
        "KV cache": _kv_cache,
    }
    output.table(columns, instances, title="Instances")
    for view in found:
        where = f"{view['job']}/{view['name']}"
        if view["failure"] is not None:
            print_line(f"{where} failed: {view['failure']['message']}")
        if view["round"]:
            queued = view["queued_prompts"]
            waiting = "1 prompt waits" if queued == 1 else f"{queued} prompts wait"
            print_line(f"{where}: {view['round']} round{_extra(view)}; {waiting} for a long one")
        if view["waits_for"]:
            print_line(f"{where}: {view['waits_for']}")
        if view["instances_reason"]:
            wanted, bounds = (
                view["instances_wanted"],
                (view["instances_min"], view["instances_max"]),
            )
            within = "" if not bounds[1] else f" of {bounds[0]} to {bounds[1]}"
            print_line(f"{where}: {wanted} instances{within}; {view['instances_reason']}")
        if view["dropped"]:
            groups = "1 prompt was" if view["dropped"] == 1 else f"{view['dropped']} prompts were"
            print_line(f"{where}: {groups} dropped, the last because: {view['dropped_reason']}")
    for each in instances:
        if each["reason"]:
            print_line(f"{each['of']['job']}/{each['name']} is {each['state']}: {each['reason']}")


def shares(counts: dict[str, int]) -> str:
    """Counts by staleness as shares, such as `0: 63 %, 1: 37 %`."""
    total = sum(counts.values())
    return ", ".join(
        f"{age}: {100 * counts[age] / total:.0f} %"
        for age in sorted(counts, key=int)
        if counts[age]
    )


def _kv_cache(instance: InstanceView) -> str:
    """The tokens in the KV cache and its size in tokens."""
    used, size = instance["kv_tokens"], instance["kv_budget"]
    return f"{100 * used / size:.0f} %" if size and used is not None else ""


def _extra(view: RolloutStatus) -> str:
    """What the round starts beyond what is trained, and why."""
    prompts, samples = view["round_extra_prompts"], view["round_extra_samples"]
    gain = view["over_launch_gain"]
    why = "" if gain is None else f" (expected gain of the best choice: {gain:.2f})"
    return f" with {prompts} more prompts and {samples} more samples of each{why}"

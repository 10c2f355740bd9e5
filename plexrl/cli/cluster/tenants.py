"""`plexrl tenants`: weights, quotas and priorities."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from plexrl.cli.terminal.context import (
    GIB,
    Access,
    Cells,
    Output,
    ShowKey,
    check_shown,
    print_records,
)
from plexrl.cli.terminal.help import CommandGroup
from plexrl.cli.terminal.option_groups import option_name, with_option_groups
from plexrl.wire.messages.cluster_views import DescribedTenantView

tenants_app = typer.Typer(
    cls=CommandGroup,
    help="Tenants, their weights and quotas (operator only).",
    no_args_is_help=True,
)
Limit = Annotated[str | None, typer.Option(help="A number, or `none` for no quota.")]
Bound = Annotated[
    str | None, typer.Option(help="A number, or `none` for the cluster's default limit.")
]


@tenants_app.command("create")
@with_option_groups
def create_tenant(
    name: Annotated[str, typer.Argument(help="Letters, digits, '.', '_' and '-'.")],
    access: Access,
    output: Output,
    show_key: ShowKey = False,
) -> None:
    """Create a tenant; its first API key, an admin's, is shown only now."""
    check_shown(show_key=show_key)
    with access.open() as cluster:
        found = {"tenant": name, "api_key": cluster.create_tenant(name)}
    output.table({"tenant": "tenant", "API key": "api_key"}, [found], found)


@tenants_app.command("list")
@with_option_groups
def list_tenants(access: Access, output: Output) -> None:
    """All tenants: weights, quotas, current and past use."""
    with access.open() as cluster:
        found = cluster.tenants()
    _show(output, found, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFlags:
    """The settings of a tenant; absent ones stay unchanged."""

    weight: Annotated[
        float | None, typer.Option(help="Share of the cluster relative to other tenants.")
    ] = None
    jobs_max: Limit = None
    gpus_max: Limit = None
    gpu_seconds_max: Limit = None
    live_jobs_max: Bound = None
    checkpoints_max: Bound = None
    checkpoint_bytes_max: Bound = None
    priority_max: Annotated[
        int | None, typer.Option(help="Highest priority of its jobs, -100 to 100.")
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            help="Part of its time that a job of it may wait, if it names none: 0 to below 1, or "
            "none for the cluster's."
        ),
    ] = None
    model_roots: Annotated[
        str | None,
        typer.Option(
            help="Directories below which it may load models, separated by commas, or none."
        ),
    ] = None


@tenants_app.command("set")
@with_option_groups
def set_tenant(
    name: Annotated[str, typer.Argument(help="The tenant.")],
    given: TenantFlags,
    access: Access,
    output: Output,
) -> None:
    """Set a tenant's weight, quotas and highest priority; other settings stay unchanged."""
    named = asdict(given)
    settings = {key: _setting(key, value) for key, value in named.items() if value is not None}
    if not settings:
        *options, last = map(option_name, named)
        raise typer.BadParameter(f"nothing to set: give {', '.join(options)} or {last}")
    with access.open() as cluster:
        found = cluster.configure_tenant(name, **settings)
    _show(output, [found], found)


def _show(output: Output, tenants: list[DescribedTenantView], found: Any) -> None:
    """Print two tables, because one with all columns is wider than a terminal."""
    cells: Cells = {
        "tenant": "tenant",
        "weight": lambda each: f"{each['weight']:g}",
        "share": lambda each: f"{each['share']:.2f}",
        "priority at most": lambda each: "any" if each["is_operator"] else each["priority_max"],
        "SLO": lambda each: "cluster's" if each["slo"] is None else f"{each['slo']:.0%}",
        "jobs": lambda each: _of(each["jobs_running"], each["jobs_max"]),
        "GPUs": lambda each: _of(each["gpus_held"], each["gpus_max"]),
        "GPU-hours": lambda each: _of(each["gpu_seconds"], each["gpu_seconds_max"], _hours),
    }
    output.table(cells, tenants, found)
    if not output.as_json:
        cells = {
            "tenant": "tenant",
            "live jobs": lambda each: _of(each["live_jobs"], each["live_jobs_bound"]),
            "checkpoints": lambda each: _of(each["checkpoints"], each["checkpoints_bound"]),
            "GiB of checkpoints": lambda each: _of(
                each["checkpoint_bytes"], each["checkpoint_bytes_bound"], _gib
            ),
            "model roots": lambda each: (
                "any" if each["is_operator"] else ", ".join(each["model_roots"])
            ),
        }
        print_records("Storage", cells, tenants)


def _setting(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if key == "model_roots":
        return [] if value == "none" else [root.strip() for root in value.split(",")]
    if value == "none":
        return None
    try:
        return float(value) if key in ("gpu_seconds_max", "slo") else int(value)
    except ValueError as error:
        raise typer.BadParameter(
            f"{option_name(key)} is {value!r}: give a number or none"
        ) from error


def _of(used: Any, bound: Any, text: Callable[[Any], str] = str) -> str:
    return text(used) if bound is None else f"{text(used)} of {text(bound)}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.3g}"


def _hours(gpu_seconds: float) -> str:
    # Three digits, whatever the size: a budget of one second is not 0.000 hours.
    hours = gpu_seconds / 3600
    return f"{hours:.3f}" if hours >= 1 or not hours else f"{hours:.3g}"

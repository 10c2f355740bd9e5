"""`plexrl tenants`: keys, weights, quotas and priorities."""

from typing import Annotated, Any

import typer

from plexrl.cli.terminal.context import (
    DATA_DIR,
    GIB,
    DataDir,
    Json,
    Key,
    Output,
    Url,
    local_time,
    open_cluster,
)
from plexrl.cli.terminal.help import CommandGroup

tenants_app = typer.Typer(
    cls=CommandGroup,
    help="Tenants, their API keys, weights and quotas (operator only).",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="The tenant; `operator` for the operator.")]
Limit = Annotated[str | None, typer.Option(help="A number, or `none` for no quota.")]
Bound = Annotated[
    str | None, typer.Option(help="A number, or `none` for the cluster's default limit.")
]
COLUMNS = ("tenant", "weight", "share", "priority at most", "jobs", "GPUs", "GPU-hours")
STORED = ("tenant", "live jobs", "checkpoints", "GiB of checkpoints")


@tenants_app.command("create")
def create_tenant(
    name: Annotated[str, typer.Argument(help="Letters, digits, '.', '_' and '-'.")],
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Create a tenant; its API key is shown only now."""
    with open_cluster(url, api_key, data_dir) as cluster:
        key = cluster.create_tenant(name)
    found = {"tenant": name, "api_key": key}
    Output(as_json).table("", ("tenant", "API key"), [(name, key)], found)


@tenants_app.command("list")
def list_tenants(
    url: Url = None, api_key: Key = None, data_dir: DataDir = DATA_DIR, as_json: Json = False
) -> None:
    """All tenants: weights, quotas, current and past use."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.tenants()
    _show(Output(as_json), found, found)


@tenants_app.command("keys")
def list_keys(
    name: Name,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Ids of a tenant's API keys, with creation and last use; never the keys."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.tenant_keys(name)
    rows = [
        (each["key"], local_time(each["created_at"]), local_time(each["last_used_at"]))
        for each in found
    ]
    columns = ("key", "created", "last used since the scheduler's start")
    Output(as_json).table("", columns, rows, found)


@tenants_app.command("rotate")
def rotate_key(
    name: Name,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Create a new API key for a tenant, shown only now; old keys stay valid until revoked."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.rotate_key(name)
    columns = ("tenant", "key", "API key")
    rows = [(name, found["key"], found["api_key"])]
    Output(as_json).table("", columns, rows, found)


@tenants_app.command("revoke")
def revoke_key(
    name: Name,
    key: Annotated[str, typer.Argument(help="The key's id (`plexrl tenants keys`).")],
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Revoke an API key of a tenant: every router refuses it from now on."""
    with open_cluster(url, api_key, data_dir) as cluster:
        cluster.revoke_key(name, key)
        found = cluster.tenant_keys(name)
    rows = [(name, key, len(found))]
    Output(as_json).table("", ("tenant", "key", "keys left"), rows, found)


@tenants_app.command("set")
def set_tenant(
    name: Annotated[str, typer.Argument(help="The tenant.")],
    weight: Annotated[
        float | None, typer.Option(help="Share of the cluster relative to other tenants.")
    ] = None,
    jobs_max: Limit = None,
    gpus_max: Limit = None,
    gpu_seconds_max: Limit = None,
    live_jobs_max: Bound = None,
    checkpoints_max: Bound = None,
    checkpoint_bytes_max: Bound = None,
    priority_max: Annotated[
        int | None, typer.Option(help="Highest priority of its jobs, -100 to 100.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Set a tenant's weight, quotas and highest priority; other settings stay unchanged."""
    settings: dict[str, Any] = {}
    if weight is not None:
        settings["weight"] = weight
    if priority_max is not None:
        settings["priority_max"] = priority_max
    for key, text, kind in (
        ("jobs_max", jobs_max, int),
        ("gpus_max", gpus_max, int),
        ("gpu_seconds_max", gpu_seconds_max, float),
        ("live_jobs_max", live_jobs_max, int),
        ("checkpoints_max", checkpoints_max, int),
        ("checkpoint_bytes_max", checkpoint_bytes_max, int),
    ):
        if text is not None:
            settings[key] = _limit(key, text, kind)
    if not settings:
        raise typer.BadParameter(
            "nothing to set: give --weight, --jobs-max, --gpus-max, --gpu-seconds-max, "
            "--live-jobs-max, --checkpoints-max, --checkpoint-bytes-max or --priority-max"
        )
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.configure_tenant(name, **settings)
    _show(Output(as_json), [found], found)


def _show(output: Output, tenants: list[dict[str, Any]], found: Any) -> None:
    """Print two tables, because one with all columns is wider than a terminal."""
    output.table("", COLUMNS, [_row(each) for each in tenants], found)
    if not output.is_json:
        output.table("Storage", STORED, [_stored(each) for each in tenants], found)


def _limit(key: str, text: str, kind: type[int] | type[float]) -> float | None:
    if text == "none":
        return None
    try:
        return kind(text)
    except ValueError as error:
        option = f"--{key.replace('_', '-')}"
        raise typer.BadParameter(f"{option} is {text!r}: give a number or none") from error


def _row(tenant: dict[str, Any]) -> tuple[Any, ...]:
    return (
        tenant["tenant"],
        f"{tenant['weight']:g}",
        f"{tenant['share']:.2f}",
        "any" if tenant["is_operator"] else tenant["priority_max"],
        _of(tenant["jobs_running"], tenant["jobs_max"]),
        _of(tenant["gpus_held"], tenant["gpus_max"]),
        _of(_hours(tenant["gpu_seconds"]), _hours(tenant["gpu_seconds_max"])),
    )


def _stored(tenant: dict[str, Any]) -> tuple[Any, ...]:
    return (
        tenant["tenant"],
        _of(tenant["live_jobs"], tenant["live_jobs_bound"]),
        _of(tenant["checkpoints"], tenant["checkpoints_bound"]),
        _of(_gib(tenant["checkpoint_bytes"]), _gib(tenant["checkpoint_bytes_bound"])),
    )


def _of(used: object, bound: object) -> str:
    return f"{used}" if bound is None else f"{used} of {bound}"


def _gib(nbytes: int | None) -> str | None:
    return None if nbytes is None else f"{nbytes / GIB:.3g}"


def _hours(gpu_seconds: float | None) -> str | None:
    return None if gpu_seconds is None else f"{gpu_seconds / 3600:.3f}"

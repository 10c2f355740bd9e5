"""`plexrl`: run a cluster, look at it, try the demo."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from plexrl.cli.context import DATA_DIR, Output, data_dir_option, open_cluster
from plexrl.errors import PlexRLError

app = typer.Typer(
    name="plexrl",
    help="LLM execution for RL with verifiable rewards, as a shared service of the cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
tenants_app = typer.Typer(help="Tenants and their API keys (operator only).", no_args_is_help=True)
app.add_typer(tenants_app, name="tenants")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Url = Annotated[str | None, typer.Option(help="The cluster's URL.", envvar="PLEXRL_URL")]
Key = Annotated[
    str | None, typer.Option(help="The API key.", envvar="PLEXRL_API_KEY", show_envvar=True)
]
DataDir = Annotated[
    Path, typer.Option(help="Data directory of a local cluster.", envvar="PLEXRL_DATA_DIR")
]
GIB = 1 << 30


@app.command()
def up(
    data_dir: DataDir = DATA_DIR,
    nodes: Annotated[int, typer.Option(help="Virtual nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Places for workers on each node.")] = 4,
    gpu_memory: Annotated[float, typer.Option(help="GiB of each GPU.")] = 2.0,
    host_memory: Annotated[float, typer.Option(help="GiB of each node's host tier.")] = 2.0,
    policy: Annotated[str, typer.Option(help="Placement: pack or isolated.")] = "pack",
    port: Annotated[int, typer.Option(help="Port of the API; 0 takes a free one.")] = 0,
    journal_bytes_max: Annotated[int | None, typer.Option(help="Bound of the journal.")] = None,
    as_json: Json = False,
) -> None:
    """Run a cluster of local processes until Ctrl-C."""
    from plexrl.cluster.config import ClusterOptions
    from plexrl.cluster.supervisor import Endpoint, run_cluster

    def ready(endpoint: Endpoint) -> None:
        if as_json:
            sys.stdout.write(endpoint.to_json() + "\n")
        else:
            sys.stdout.write(
                f"PlexRL is up. Ctrl-C ends it.\n\n"
                f"  export PLEXRL_URL={endpoint.url}\n"
                f"  export PLEXRL_API_KEY={endpoint.api_key}   # the operator's\n\n"
                f"  API documentation: {endpoint.url}/docs\n"
                f"  logs and state:    {endpoint.data_dir}\n"
            )
        sys.stdout.flush()

    options = ClusterOptions(
        data_dir=data_dir_option(data_dir),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=int(gpu_memory * GIB),
        host_memory_bytes=int(host_memory * GIB),
        policy=policy,
        port=port,
        journal_bytes_max=journal_bytes_max,
    )
    run_cluster(options, ready)


@app.command()
def status(
    url: Url = None, api_key: Key = None, data_dir: DataDir = DATA_DIR, as_json: Json = False
) -> None:
    """The cluster in a few numbers."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.status()
    rows = [(name.replace("_", " "), value) for name, value in found.items() if name != "now"]
    Output(as_json).table("Cluster", ("what", "value"), rows, found)


@app.command()
def jobs(
    job: Annotated[str | None, typer.Argument(help="Show this one in full.")] = None,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Jobs: who runs, who waits, where their models are."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = (
            cluster.jobs() if job is None else [cluster.attach_job(job, heartbeat=False).status()]
        )
    output = Output(as_json)
    if job is not None:
        columns = ("deployment", "kind", "state", "residency", "group", "workers", "pending")
        rows = [tuple(d[name] for name in columns) for d in found[0]["deployments"]]
        title = f"{found[0]['name']} of {found[0]['tenant']}: {found[0]['state']}"
        output.table(title, columns, rows, found[0])
        return
    summary = [
        (
            each["job"],
            each["tenant"],
            each["state"],
            "yes" if each["attached"] else "no",
            ", ".join(
                f"{d['deployment'].rsplit('/', 1)[1]} {d['residency']}" for d in each["deployments"]
            ),
            each["reason"],
        )
        for each in found
    ]
    headings = ("job", "tenant", "state", "attached", "deployments", "reason")
    output.table("Jobs", headings, summary, found)


@app.command()
def nodes(
    url: Url = None, api_key: Key = None, data_dir: DataDir = DATA_DIR, as_json: Json = False
) -> None:
    """Nodes and their GPUs."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.nodes()
    rows = [
        (
            each["node"],
            "yes" if each["alive"] else "no",
            f"{each['gpus_reserved']}/{each['gpus']}",
            f"{each['gpu_memory_bytes'] / GIB:.1f} GiB",
            f"{each['host_memory_bytes'] / GIB:.1f} GiB",
        )
        for each in found
    ]
    columns = ("node", "alive", "GPUs reserved", "per GPU", "host tier")
    Output(as_json).table("Nodes", columns, rows, found)


@app.command()
def groups(
    url: Url = None, api_key: Key = None, data_dir: DataDir = DATA_DIR, as_json: Json = False
) -> None:
    """Node groups: who holds each, what switching has cost (operator only)."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.groups()
    rows = [
        (
            each["group"],
            ", ".join(f"{gpu['node']}:{gpu['gpu']}" for gpu in each["gpus"]),
            ", ".join(each["members"]),
            each["holder"] or "nobody",
            each["phase"],
            each["switches"],
            f"{each['switch_seconds']:.2f}",
        )
        for each in found
    ]
    columns = ("group", "GPUs", "members", "held by", "phase", "switches", "seconds in them")
    Output(as_json).table("Groups", columns, rows, found)


@app.command()
def logs(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    deployment: Annotated[str | None, typer.Option(help="Only this deployment's.")] = None,
    lines: Annotated[int, typer.Option(help="Last lines of each worker.")] = 100,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """The ends of a job's worker logs."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.attach_job(job, heartbeat=False).logs(deployment, lines)
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for each in found:
        sys.stdout.write(f"==> {each['deployment']} rank {each['rank']} <==\n{each['text']}\n")


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
    Output(as_json).table("Tenant", ("tenant", "API key"), [(name, key)], found)


@tenants_app.command("list")
def list_tenants(
    url: Url = None, api_key: Key = None, data_dir: DataDir = DATA_DIR, as_json: Json = False
) -> None:
    """All tenants."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.tenants()
    Output(as_json).table("Tenants", ("tenant",), [(name,) for name in found], found)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(help="RL steps of each job.")] = 150,
    seed: Annotated[int, typer.Option(help="Of models, data and sampling.")] = 1,
    workers: Annotated[int, typer.Option(help="Workers of a training group.")] = 2,
    isolated: Annotated[bool, typer.Option(help="Measure the isolated baseline too.")] = True,
    as_json: Json = False,
) -> None:
    """Train two tenants' jobs on one shared group, then each alone; write a report."""
    from rich.console import Console

    from plexrl.demo.report import report_json
    from plexrl.demo.run import DemoOptions, run_demo

    options = DemoOptions(out=out, steps=steps, seed=seed, workers=workers, isolated=isolated)
    result = run_demo(options, Console(stderr=as_json))
    if as_json:
        sys.stdout.write(json.dumps(report_json(result)) + "\n")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        sys.stdout.write(f"plexrl {version('plexrl')}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM execution for RL with verifiable rewards, as a shared service of the cluster."""
    del version


def run_command(command: Callable[[], Any]) -> int:
    """Run the command line; a typed error becomes one message and the exit code 1."""
    try:
        command()
    except PlexRLError as error:
        if "--json" in sys.argv:
            sys.stdout.write(json.dumps({"error": error.to_wire()}) + "\n")
        else:
            sys.stderr.write(f"plexrl: {error.message}\n")
        return 1
    return 0


def main() -> None:
    """The console script."""
    sys.exit(run_command(app))


if __name__ == "__main__":
    main()

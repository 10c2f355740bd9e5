"""`plexrl doctor`: what is wrong, and for each fault the command that mends it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypedDict

import typer

from plexrl.cli.cluster.observe.status import problems
from plexrl.cli.terminal.context import Access, Output, local_time, print_line, write_json
from plexrl.cli.terminal.option_groups import with_option_groups

if TYPE_CHECKING:
    from plexrl.wire.messages.cluster_views import NodeView, StatusView
    from plexrl.wire.messages.overview_views import ClusterOverview


class Finding(TypedDict):
    """One thing that is wrong, or a hint."""

    code: str
    is_wrong: bool
    """False: a hint at what may be better, or may be meant so."""
    since: float | None
    """Seconds since the epoch; None: unknown."""
    what: str
    remedy: str
    """The command, or what a person has to do."""


REMEDIES: Final[dict[str, str]] = {
    "unavailable": "start the scheduler: `plexrl up`, or see its log in the data directory",
    "part_down": "nothing, if it is up again within a minute; otherwise read its log in the data "
    "directory",
    "part_stuck": "nothing: it is replaced if it goes on so; read its log for the reason",
    "storage_full": "free space on the disk of the data directory: `plexrl checkpoints list JOB` "
    "shows what `plexrl checkpoints delete JOB NAME` may delete",
    "journal_full": "free space on the disk of the journal, or raise its quota",
    "history_behind": "see to the disk or object store of `archive_url`; nothing else waits for it",
    "journal_unavailable": "see to the database of the journal, and to its disk",
    "operation_overdue": "`plexrl logs JOB`; its workers are replaced without your help",
    "workers_restarting": "`plexrl logs JOB` has the reason; `plexrl cancel JOB` if it cannot work",
    "node_lost": "start the node's agent again, or `plexrl nodes remove NODE` if it does not come "
    "back",
    "workers_unreachable": "see to the network between the routers and the node that it names",
    "slo_breached": "`plexrl explain JOB`: drain nothing, add nodes, or accept more (`slo`)",
    "head_job_blocks": "`plexrl cancel` what runs too long, raise `starvation_bound_s`, or give "
    "jobs an `expected_s` that holds",
    "folder_missing": "mount the folder again",
    "folder_stalled": "see to the file system that it names",
    "statemanager_unhealthy": "`plexrl statemanager-status` on that node",
    "clock_ahead": "set the machine's clock: `timedatectl`; times are right again after as long",
    "deployments_held": "free memory or disk space on the node that it names; they go on by "
    "themselves",
    "foreign_memory": "end the process that it names, or `plexrl nodes drain NODE`",
    "part": "nothing, if it is up again within a minute; otherwise read its log in the data "
    "directory",
    "impossible": "add nodes, `plexrl nodes undrain NODE`, or `plexrl cancel JOB`: the page "
    "/dashboard lists them",
    "snapshot_error": "report it; the journal grows until it is mended",
    "event_broker": "start the MQTT broker, or see to its address",
    "scheduler_fault": "report it with the line of the scheduler's log; nothing is lost",
}
"""What mends each condition of `/v1/health`, and what else `problems` names."""


@with_option_groups
def doctor(access: Access, output: Output) -> None:
    """What is wrong, with the command that mends it; exit code 1 if anything is. Then hints."""
    with access.open() as cluster:
        found = [
            *_problems(cluster.status()),
            *_capacity(cluster.overview()),
            *_nodes(cluster.nodes()),
        ]
    if output.as_json:
        write_json(found)
    else:
        show(found)
    if any(each["is_wrong"] for each in found):
        raise typer.Exit(1)


def show(found: list[Finding]) -> None:
    """Print each finding with its remedy below it, hints last."""
    if not any(each["is_wrong"] for each in found):
        print_line("Nothing is wrong.")
    for each in sorted(found, key=lambda each: not each["is_wrong"]):
        since = f" since {local_time(each['since'])}" if each["since"] is not None else ""
        code, remedy = each["code"], "mend it"
        if not each["is_wrong"]:
            code, remedy = f"hint: {code}", "you may"
        print_line(f"{code}{since}: {each['what']}")
        print_line(f"    {remedy}: {each['remedy']}")


def _problems(found: "StatusView") -> Iterator[Finding]:
    for code, since, what in problems(found):
        remedy = REMEDIES.get(code, "docs/health.md says what it means")
        what = what or "the operator's key shows more"
        yield {"code": code, "is_wrong": True, "since": since, "what": what, "remedy": remedy}


def _capacity(view: "ClusterOverview") -> Iterator[Finding]:
    if not view["gpus"]["gpus"]:
        remedy = (
            "on the head `plexrl node token` makes a token for another machine, if it was started "
            "with `plexrl up --tls`; otherwise `plexrl up --gpus N`"
        )
        yield _finding("no_gpus", "no node has joined", remedy)
    states = view["gpus"]["states"]
    if view["waiting"] and states.get("free", 0) > view["gpus"]["gpus"] / 4:
        what = f"{states['free']} GPUs are free, and {view['waiting']} deployments wait"
        remedy = "`plexrl explain JOB` of one that waits: a quota, a type of nodes, a reservation"
        yield _finding("free_gpus", what, remedy, is_wrong=False)


def _nodes(nodes: "list[NodeView]") -> Iterator[Finding]:
    for node in nodes:
        if node["is_draining"] and not node["gpus_reserved"]:
            what = f"node {node['node']} is drained and empty"
            remedy = (
                f"`plexrl nodes undrain {node['node']}`, or `plexrl nodes remove "
                f"{node['node']}` if it goes"
            )
            yield _finding("drained", what, remedy, is_wrong=False)


def _finding(code: str, what: str, remedy: str, *, is_wrong: bool = True) -> Finding:
    return {"code": code, "is_wrong": is_wrong, "since": None, "what": what, "remedy": remedy}

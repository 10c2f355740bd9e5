"""`plexrl explain`: shows why a job waits or runs."""

from itertools import groupby

from plexrl.cli.terminal.context import (
    Access,
    Cells,
    Output,
    print_line,
    print_records,
    print_table,
    seconds,
    write_json,
)
from plexrl.cli.terminal.job_ids import JobArgument, find_job, paced_line
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.wire.messages.cluster_views import EtaQualityView
from plexrl.wire.messages.run_views import RunHealthView
from plexrl.wire.messages.views import (
    HolderView,
    PlacedDeploymentView,
    RolloutWaitView,
    WaitingOperationView,
)

GIB = 1 << 30

IDLE_S = 60.0
"""Shorter idle times are normal between two steps."""


@with_option_groups
def explain(
    job: JobArgument,
    access: Access,
    output: Output,
) -> None:
    """Why a job waits or runs as it does: its operations, its GPUs, and until when."""
    with access.open() as cluster:
        view = find_job(cluster, job).explain()
    if output.as_json:
        write_json(view)
        return
    print_line(f"{view['name']} of {view['tenant']} is {view['state']}: {view['summary']}.")
    print_warnings(view.get("health"))
    print_rollouts(view.get("rollouts"))
    print_holders(view["holders"])
    _operations(view["operations"])
    _deployments(view["deployments"], view["slo"])
    for deployment in view["deployments"]:
        _attempts(deployment)
        _memory(deployment)
        _near(deployment)
    _quality(view["eta_quality"])


def print_warnings(health: RunHealthView | None) -> None:
    """Print the signs that the run is sick."""
    for warning in [] if health is None else health["warnings"]:
        print_line(f"Warning ({warning['code']}): {warning['text']}.")


def print_rollouts(rollouts: list[RolloutWaitView] | None) -> None:
    """Print what each asynchronous rollout of the job waits for."""
    if rollouts is None:
        print_line("What its asynchronous rollouts wait for is unknown: their service is away.")
        return
    for rollout in rollouts:
        if rollout["waits_for"]:
            print_line(f"{rollout['rollout']}: {rollout['waits_for']}.")


def print_holders(holders: list[HolderView]) -> None:
    """Print the holders of the GPUs that the job waits for, and those that look abandoned."""
    if not holders:
        return
    cells: Cells = {
        "job": lambda each: each["job"] or "another tenant's job",
        "tenant": "tenant",
        "GPUs": "gpus",
        "condition": "condition",
        "controller silent for": lambda each: seconds(each["silent_s"]),
        "idle for": lambda each: seconds(each["idle_s"]),
        "cancelled in": lambda each: seconds(each["cancelled_in_s"]),
    }
    print_records("Who has the GPUs", cells, holders)
    for holder in holders:
        if holder["condition"] in ("detached", "silent") or (holder["idle_s"] or 0.0) > IDLE_S:
            print_line("")
            print_line(_abandoned(holder))


def _abandoned(holder: HolderView) -> str:
    if holder["condition"] == "idle":
        what = (
            f"has run nothing for {seconds(holder['idle_s'])}; its controller is alive, so it "
            "keeps its GPUs until the job ends"
        )
    else:
        what = (
            f"has not ended, and its controller has been silent for "
            f"{seconds(holder['silent_s'])}; it is cancelled in "
            f"{seconds(holder['cancelled_in_s'])} unless a controller returns"
        )
    if holder["job"] is None:
        return f"A job of another tenant {what}. An operator can end it earlier."
    return f"{holder['job']} {what}. To end it now: plexrl cancel {holder['job']}"


def _operations(operations: list[WaitingOperationView]) -> None:
    """Print one row for consecutive operations with the same cause, with the first one's times."""
    if not operations:
        return
    rows = []
    for (deployment, reason, rule, holder), run in groupby(operations, key=_cause):
        first, *others = run
        more = f", {len(others)} more" if others else ""
        rows.append(
            (
                deployment.rpartition("/")[2],
                f"{first['kind']} {_short(first['operation'])}{more}",
                reason,
                rule,
                holder or "nobody",
                seconds(first["waited_s"]),
                _eta(first),
            )
        )
    columns = ("deployment", "operation", "reason", "rule", "group held by", "waited", "ETA")
    print_table("Operations", columns, rows)


def _cause(operation: WaitingOperationView) -> tuple[str, str, str, str | None]:
    each = operation
    return each["deployment"], each["reason"], each["rule"], each["holder"]


def _short(operation: str) -> str:
    """A short form of `<job>:<name>`."""
    return operation.rpartition(":")[2][:8]


def _eta(operation: WaitingOperationView) -> str:
    if operation["eta_s"] is None:
        return "unknown"
    verb = "ends" if operation["rule"] == "running" else "starts"
    found = f"{verb} in {seconds(operation['eta_s'])}"
    if operation["eta_low_s"] is None:
        return found
    return f"{found} ({seconds(operation['eta_low_s'])} to {seconds(operation['eta_high_s'])})"


def _deployments(deployments: list[PlacedDeploymentView], slo: float) -> None:
    if not deployments:
        return
    rows = [{**(deployment["placement"] or {}), **deployment} for deployment in deployments]
    cells: Cells = {
        "deployment": lambda each: each["deployment"].rpartition("/")[2],
        "state": "state",
        "groups": lambda each: " ".join(each["groups"]) or "none",
        "nodes": lambda each: ", ".join(each["nodes"]),
        "topology": "topology",
        "mode": lambda each: each.get("way"),
        "shift": lambda each: seconds(each.get("shift_s")),
        "overlap": lambda each: seconds(each.get("overlap_s")),
        "waits": lambda each: _part(each["waiting_part"]),
        "SLO": lambda _: _part(slo),
        "moves": "moves",
        "why": "moved_because",
    }
    print_records("Deployments", cells, rows)
    for each in deployments:
        if each["pace"]:
            print_line(paced_line(each["deployment"], each["pace"]))
        if each["sharing"]:
            print_line(f"{each['deployment']} {each['sharing']}")


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _attempts(deployment: PlacedDeploymentView) -> None:
    if deployment["attempts"]:
        cells: Cells = {"placement mode": "way", "obstacle": "why"}
        print_records(f"Why {deployment['deployment']} has no GPUs", cells, deployment["attempts"])


def _memory(deployment: PlacedDeploymentView) -> None:
    """Print the sum on each GPU; not for virtual GPUs, where only the state counts."""
    memory = deployment["memory"]
    if memory is None or (deployment["group"] is not None and not memory["gpu_kind"]):
        return
    how = "measured" if memory["is_measured"] else "estimated"
    rows: list[tuple[str, int]] = [
        (term["name"] + (f" ({how})" if term["name"] == "activations" else ""), term["nbytes"])
        for term in memory["terms"]
    ]
    rows.append(("sum", memory["need_bytes"]))
    if memory["gpu_kind"] and memory["gpu_memory_bytes"] is not None:
        rows.append(("others of the group keep", memory["others_keep_bytes"]))
        rows.append((f"a {memory['gpu_kind']} has", memory["gpu_memory_bytes"]))
    table = [(name, f"{nbytes / GIB:.2f} GiB") for name, nbytes in rows]
    print_table(f"Memory of {deployment['deployment']} on each GPU", ("part", "size"), table)


def _near(deployment: PlacedDeploymentView) -> None:
    if not deployment["near"]:
        return
    cells: Cells = {
        "group": "group",
        "members": lambda each: ", ".join(each["members"]),
        "shift": lambda each: seconds(each["shift_s"]),
        "overlap": lambda each: seconds(each["overlap_s"]),
        "interference": lambda each: seconds(each["interference_s"]),
        "load": lambda each: f"{each['load']:.0%}",
    }
    title = f"Groups with the best gaps for {deployment['deployment']}"
    print_records(title, cells, deployment["near"])


def _quality(quality: EtaQualityView) -> None:
    print_line("")
    if not quality["estimates"]:
        print_line("No estimated start has been verified yet.")
        return
    print_line(
        f"The {quality['estimates']} estimated starts of this cluster so far had a mean error of "
        f"{seconds(quality['mean_error_s'])} and a mean delay of "
        f"{seconds(quality['mean_late_s'])}; {quality['slipped']} took over twice as long. "
        f"{quality['early']} were before their 80 % interval, {quality['late']} after it."
    )

"""Column layouts of public job traces; each loader converts one row to one job.

None of these sources has RL jobs; they provide arrivals, sizes and durations. Here `submit_s` is on
the source's clock; sorting shifts it to start at 0.
"""

import math
from collections.abc import Sequence
from typing import Any

from plexrl.traces.formats.records import Fields

Values = dict[str, Any]
"""Fields of a `TraceJob`."""

NO_GPU, NEVER_RAN, NO_ID = "asks for no GPU", "never ran", "has no id"
STILL_RAN = "still ran when the log was taken"
"""Reasons why a row is not a job."""

OUTCOMES = {
    **dict.fromkeys(("completed", "succeeded", "terminated", "pass"), "completed"),
    **dict.fromkeys(("failed", "timeout", "node_fail"), "failed"),
    **dict.fromkeys(("cancelled", "killed"), "cancelled"),
}
"""Outcome by the sources' names; the papers count `TIMEOUT` and `NODE_FAIL` as failures."""


def philly_flat(fields: Fields) -> Values | str:
    """Microsoft Philly in the flat copy of Pollux and Sia: one row per job.

    The copy has no ids, so a job's id is its line number. `cluster` is Philly's virtual cluster.
    """
    values = {
        "job_id": f"philly-{fields.line}",
        "tenant": fields.text("cluster"),
        "submit_s": fields.time("timestamp"),
        "duration_s": fields.number("duration"),
        "gpus": fields.integer("num_gpus"),
    }
    return kept(fields, values)


def philly(fields: Fields) -> Values | str:
    """Microsoft Philly as bundled: job_id, tenant, submit_s, duration_s, gpus."""
    values = {
        "job_id": fields.text("job_id"),
        "tenant": fields.text("tenant"),
        "submit_s": fields.number("submit_s"),
        "duration_s": fields.number("duration_s"),
        "gpus": fields.integer("gpus"),
    }
    return kept(fields, values)


def slurm(fields: Fields) -> Values | str:
    """Helios `cluster_log.csv`, Acme `trace_seren.csv`, `trace_kalos.csv`: one Slurm job per row.

    The tenant is the virtual cluster, or the user if there is none (Acme). The duration is the time
    from start to end: in Kalos the column `duration` includes the wait in the queue.
    """
    state = fields.text("state").lower()
    is_over = fields.has("end_time") or fields.has("duration")
    if state in _SLURM_RUNNING or (not is_over and fields.has("start_time")):
        return STILL_RAN
    if state in _SLURM_WAITING or (not is_over and fields.exists("start_time")):
        return NEVER_RAN
    values = {
        "job_id": fields.text("job_id"),
        "tenant": fields.text("vc") or fields.text("user"),
        "submit_s": fields.time("submit_time"),
        "duration_s": _slurm_duration_s(fields),
        "gpus": fields.integer("gpu_num"),
        "model": fields.text("type"),
        "outcome": OUTCOMES.get(state, ""),
    }
    if fields.has("queue"):
        # Some waits are a second below 0, because of two machines' clocks.
        values["wait_s"] = max(0.0, fields.number("queue"))
    return kept(fields, values)


_SLURM_RUNNING = frozenset({"running", "suspended", "completing", "stopping"})
_SLURM_WAITING = frozenset({"pending", "requeued", "configuring"})


def _slurm_duration_s(fields: Fields) -> float:
    if not (fields.has("start_time") and fields.has("end_time")):
        return fields.number("duration")
    start_s, end_s = fields.time("start_time"), fields.time("end_time")
    if end_s < start_s and not fields.faults:
        fields.faults.append(("end_time", f"is {start_s - end_s:g} s before start_time"))
    # The fault is reported once, not also as a duration that is not positive.
    return 1.0 if fields.faults else end_s - start_s


PAI_TASK_COLUMNS = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)
"""Columns of Alibaba PAI's `pai_task_table.csv`, whose header is a separate file."""


_PAI_STATUS = frozenset({"Terminated", "Failed", "Running", "Waiting", "Interrupted"})


def is_pai_task(cells: Sequence[str]) -> bool:
    """Whether the first line of a file without a header is a row of `pai_task_table.csv`."""
    return (
        len(cells) == len(PAI_TASK_COLUMNS)
        and cells[3] in _PAI_STATUS
        and all(_is_amount(cells[place]) for place in (2, 4, 5, 6, 7, 8))
    )


def _is_amount(cell: str) -> bool:
    return not cell or cell.replace(".", "", 1).isdecimal()


def alibaba_2020(fields: Fields) -> Values | str:
    """Alibaba PAI 2020 tasks, with instances that have a share of GPUs each.

    Each task becomes a job. The table has no submission times, so the start is used. Shares of GPUs
    are rounded up to whole GPUs.
    """
    if not fields.has("start_time"):
        return NEVER_RAN
    if not fields.has("end_time"):
        return STILL_RAN
    if not fields.has("plan_gpu"):
        return NO_GPU
    start_s, job = fields.number("start_time"), fields.text("job_name")
    instances = fields.number("inst_num") if fields.has("inst_num") else 1.0
    values = {
        "job_id": f"{job}/{fields.text('task_name')}" if job else "",
        "submit_s": start_s,
        "duration_s": fields.number("end_time") - start_s,
        "gpus": math.ceil(instances * fields.number("plan_gpu") / 100.0),
        "node_type": fields.text("gpu_type"),
        "outcome": OUTCOMES.get(fields.text("status").lower(), ""),
    }
    return kept(fields, values)


def alibaba_2023(fields: Fields) -> Values | str:
    """Alibaba GPU cluster 2023 pods (`openb_pod_list_*.csv`); a shared GPU counts as one."""
    if not fields.has("scheduled_time"):
        return NEVER_RAN
    if not fields.has("deletion_time"):
        return STILL_RAN
    submit_s, start_s = fields.number("creation_time"), fields.number("scheduled_time")
    values = {
        "job_id": fields.text("name"),
        "submit_s": submit_s,
        "duration_s": fields.number("deletion_time") - start_s,
        "gpus": fields.integer("num_gpu"),
        "node_type": fields.text("gpu_spec"),
        "wait_s": max(0.0, start_s - submit_s),
        "outcome": OUTCOMES.get(fields.text("pod_phase").lower(), ""),
    }
    return kept(fields, values)


def alibaba_2026(fields: Fields) -> Values | str:
    """Alibaba spot-GPU trace 2026 (`job_info_df.csv`): priority 1 for high-priority jobs, else
    0."""
    values = {
        "job_id": fields.text("job_name"),
        "tenant": fields.text("organization"),
        "submit_s": fields.number("submit_time"),
        "duration_s": fields.number("duration"),
        "gpus": math.ceil(fields.number("gpu_request") * fields.number("worker_num")),
        "node_type": fields.text("gpu_model"),
        "priority": int(fields.text("job_type") == "HP"),
    }
    return kept(fields, values)


def kept(fields: Fields, values: Values) -> Values | str:
    """The values, or the reason why the row is not a job; rows with faults pass unchanged."""
    if fields.faults:
        return values
    if not values["job_id"]:
        return NO_ID
    if values["gpus"] == 0:
        return NO_GPU
    if values["duration_s"] == 0:
        return NEVER_RAN
    return values

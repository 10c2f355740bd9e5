"""Microsoft Philly as released: `cluster_job_log`, one JSON list of jobs with attempts.

A job that was preempted or failed was restarted, so it has several attempts, each with its times
and its GPUs on each machine.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plexrl.traces.formats.jobs import NEVER_RAN, OUTCOMES, STILL_RAN, Values, kept
from plexrl.traces.formats.records import Fields, Record, json_text
from plexrl.traces.io.json_list import json_elements
from plexrl.traces.io.problems import Problem, Report

PLAIN = ("status", "vc", "jobid", "submitted_time", "user")
NAMES = (*PLAIN, "attempts")
"""Names of a job's fields."""

RUN_S = "attempts[].end_time"
"""Name of a job's run time in messages: the sum over its attempts."""
FIRST_START = "attempts[0].start_time"
GPUS = "attempts[0].detail[].gpus"
IS_OVER = "attempts[-1].end_time"


def philly_log_records(path: Path, report: Report) -> Iterator[Record]:
    """The jobs as records; cells of attempts are named by their path."""
    for line, value in json_elements(path, report):
        if not isinstance(value, Mapping):
            report(Problem(line=line, field="", message="is not a JSON object"))
            continue
        cells = {name: json_text(value.get(name)) for name in PLAIN}
        attempts = _attempts(value.get("attempts"))
        if attempts is None:
            message = "is not a list of attempts with detail[].gpus"
            report(Problem(line=line, field="attempts", message=message))
            continue
        for index, attempt in enumerate(attempts):
            for name in ("start_time", "end_time"):
                cells[f"attempts[{index}].{name}"] = json_text(attempt.get(name))
        if attempts:
            gpus = sum(len(each["gpus"]) for each in attempts[0].get("detail", ()))
            cells |= {GPUS: str(gpus), IS_OVER: json_text(attempts[-1].get("end_time"))}
        yield line, cells


def philly_log(fields: Fields) -> Values | str:
    """A job with the GPUs of its first attempt and the total duration of all attempts.

    The log has a few attempts without a start or an end; they add nothing.
    """
    if not fields.has(GPUS):
        return NEVER_RAN
    if not fields.has(IS_OVER):
        return STILL_RAN
    run_s, first_start_s = 0.0, None
    index = 0
    while fields.exists(f"attempts[{index}].start_time"):
        start, end = f"attempts[{index}].start_time", f"attempts[{index}].end_time"
        if fields.has(start) and fields.has(end):
            start_s = fields.time(start)
            run_s += fields.time(end) - start_s
            first_start_s = start_s if first_start_s is None else first_start_s
        index += 1
    submit_s = fields.time("submitted_time")
    values: Values = {
        "job_id": fields.text("jobid"),
        "tenant": fields.text("vc"),
        "submit_s": submit_s,
        "duration_s": run_s,
        "gpus": fields.integer(GPUS),
        "outcome": OUTCOMES.get(fields.text("status").lower(), ""),
    }
    if first_start_s is not None and not fields.faults:
        # The clocks of the scheduler and the machines differ by seconds.
        values["wait_s"] = max(0.0, first_start_s - submit_s)
    return kept(fields, values)


def _attempts(value: Any) -> list[Mapping[str, Any]] | None:
    """The attempts, if the value is a valid list of attempts."""
    if not isinstance(value, list) or not all(map(_is_attempt, value)):
        return None
    return value


def _is_attempt(value: Any) -> bool:
    machines = value.get("detail", []) if isinstance(value, Mapping) else None
    return isinstance(machines, list) and all(
        isinstance(machine, Mapping) and isinstance(machine.get("gpus"), list)
        for machine in machines
    )

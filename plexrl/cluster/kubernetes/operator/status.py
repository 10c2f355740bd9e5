"""The status of an RLJob, from its Job and from what PlexRL says. Pure: no I/O and no clock.

Nothing that a controller prints gets here, because it could hold a secret: only fixed texts, the
Job's conditions and the scheduler's explanation.
"""

from dataclasses import dataclass
from enum import StrEnum

from plexrl.cluster.kubernetes.api import KubeObject
from plexrl.cluster.kubernetes.operator.manifest import SPEC_HASH, is_owned, job_id, spec_hash

MESSAGE_MAX = 1024
QUEUED = "QUEUED"
"""State of a PlexRL job that waits for GPUs."""


class Phase(StrEnum):
    """Phase of an RLJob."""

    PENDING = "Pending"
    RUNNING = "Running"
    WAITING = "Waiting"
    """The controller runs, and its job waits for GPUs."""
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_final(self) -> bool:
        """Whether the RLJob has ended."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A job as PlexRL sees it."""

    state: str
    why: str
    is_live: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """The parts of an RLJob as last seen."""

    job: KubeObject | None
    """The Job of its name; None: there is none."""
    view: SeenJob | None
    """Its job in PlexRL; None: PlexRL does not know it."""
    problem: str = ""
    """Why PlexRL could not be asked."""


def status_of(rljob: KubeObject, seen: Seen, now: str) -> KubeObject:
    """The new status. Conditions keep their time while their status stays the same."""
    previous = rljob.get("status") or {}
    phase = _phase(rljob, seen)
    if Phase(previous.get("phase", Phase.PENDING)).is_final:
        # The Job of a finished RLJob may have been deleted since.
        phase = Phase(previous["phase"])
    generation = rljob["metadata"].get("generation", 0)
    former = {each["type"]: each for each in previous.get("conditions") or ()}
    conditions = []
    for kind, value, reason, message in _conditions(rljob, seen, phase, former):
        known = former.get(kind)
        is_same = known is not None and known["status"] == value
        conditions.append(
            {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message[:MESSAGE_MAX],
                "observedGeneration": generation,
                "lastTransitionTime": known["lastTransitionTime"] if known and is_same else now,
            }
        )
    status: KubeObject = {
        "observedGeneration": generation,
        "phase": phase.value,
        "job": job_id(rljob),
        "jobState": seen.view.state if seen.view else previous.get("jobState", ""),
        "why": _why(rljob, seen, phase, previous)[:MESSAGE_MAX],
        "conditions": conditions,
    }
    began = ((seen.job or {}).get("status") or {}).get("startTime") or previous.get("startTime")
    if began:
        status["startTime"] = began
    if phase.is_final:
        status["completionTime"] = previous.get("completionTime") or now
    return status


def _phase(rljob: KubeObject, seen: Seen) -> Phase:
    job = seen.job
    if job is None or not is_owned(job, rljob):
        return Phase.PENDING
    if _condition(job, "Complete"):
        return Phase.SUCCEEDED
    if _condition(job, "Failed"):
        return Phase.FAILED
    if job["spec"].get("suspend"):
        return Phase.SUSPENDED
    # `active` counts pods that have not started too.
    if not (job.get("status") or {}).get("ready"):
        return Phase.PENDING
    if seen.view is not None and seen.view.state == QUEUED:
        return Phase.WAITING
    return Phase.RUNNING


def _why(rljob: KubeObject, seen: Seen, phase: Phase, previous: KubeObject) -> str:
    job = seen.job
    if job is not None and not is_owned(job, rljob):
        return "a Job of this name exists and does not belong to it: delete or rename one of them"
    if phase == Phase.FAILED:
        failed = _condition(job, "Failed") if job is not None else None
        if failed is None:
            return str(previous.get("why", ""))
        return f"its controller failed: {failed.get('reason', '')}"
    if phase == Phase.SUCCEEDED:
        return "its controller has completed"
    if phase == Phase.SUSPENDED:
        return "it is suspended"
    if phase == Phase.PENDING:
        return "its controller's pod has not started"
    if seen.problem:
        return seen.problem
    return "its controller has not created its job yet" if seen.view is None else seen.view.why


def _conditions(
    rljob: KubeObject, seen: Seen, phase: Phase, former: KubeObject
) -> list[tuple[str, str, str, str]]:
    job, found = seen.job, []
    if job is None and phase.is_final:
        found.append(("JobCreated", "True", "Deleted", "the finished Job was deleted"))
    elif job is None:
        found.append(("JobCreated", "False", "Missing", "the Job does not exist yet"))
    elif not is_owned(job, rljob):
        found.append(("JobCreated", "False", "NameTaken", "another Job has the name"))
    else:
        found.append(("JobCreated", "True", "Created", "the Job exists"))
        made_of = (job["metadata"].get("annotations") or {}).get(SPEC_HASH)
        if made_of == spec_hash(rljob):
            found.append(("UpToDate", "True", "Same", "the Job is as the spec says"))
        else:
            text = "the spec changed after the Job was made: delete the RLJob and create it again"
            found.append(("UpToDate", "False", "SpecChanged", text))
    if seen.problem:
        found.append(("Registered", "Unknown", "ClusterUnavailable", seen.problem))
    elif seen.view is not None or former.get("Registered", {}).get("status") == "True":
        found.append(("Registered", "True", "Known", "PlexRL knows the job"))
    else:
        text = "the controller has not called create_job, or not with the id in PLEXRL_JOB_ID"
        found.append(("Registered", "False", "NotCreated", text))
    is_complete, is_failed = phase == Phase.SUCCEEDED, phase == Phase.FAILED
    found.append(("Complete", str(is_complete), "Finished" if is_complete else "NotFinished", ""))
    found.append(("Failed", str(is_failed), "ControllerFailed" if is_failed else "NotFailed", ""))
    return found


def _condition(job: KubeObject, kind: str) -> KubeObject | None:
    for each in (job.get("status") or {}).get("conditions") or ():
        if each["type"] == kind and each["status"] == "True":
            return dict(each)
    return None

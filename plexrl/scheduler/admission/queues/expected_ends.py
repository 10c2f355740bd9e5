"""When a running job ends, by the best estimate that there is. Pure.

The best one first:

1. *Cycles left*, if the job declared its length (`expected_s`) and one of its deployments has a
   demand trace and a measured cycle. The length is that of the job alone, so it makes so many
   cycles of the trace: the declared one, or the first profile. Those that are left take as long as
   the newest ones did, with all waiting. This wins because it sees what a length cannot: slower
   GPUs, others in the group, pauses of the controller, and cycles that grow or shrink.
2. *The declared length*, counted from the job's first GPUs: before the first measured cycle, and
   if the job has made more cycles than its length has.
3. *The length of earlier jobs* of its tenant and name in place of the declared one, else *`JOB_S`*.
   A number of cycles cannot follow from them.

A job that outlasts its estimate, or a cycle that outlasts its own, is expected to last `LATE` times
as long as it has lasted so far.
"""

from plexrl.scheduler.placement.waiting.units import expected_length
from plexrl.scheduler.state.deployment.cycles import Cycles
from plexrl.scheduler.state.records import Job, State

LATE = 1.5


def expected_end(state: State, job: Job, now: float) -> float:
    """When a job ends, counted from now if it has no GPUs yet."""
    cycles = _best_counted(state, job)
    if cycles is not None:
        left = cycles.expected - cycles.ended
        if left > -1.0:
            # A part of a cycle is an error of rounding: the open one is the last.
            return _end_of_cycles(cycles, max(left, 1.0), now)
    began_at = now if job.placed_at is None else job.placed_at
    return began_at + _outlasted(expected_length(job), now - began_at)


def left_alone_s(state: State, job: Job, period_s: float, now: float) -> float:
    """Seconds that the job still takes without others on its GPUs, at `period_s` a cycle."""
    cycles = _best_counted(state, job)
    left = None if cycles is None else cycles.expected - cycles.ended
    if left is not None and left > -1.0:
        return max(left, 1.0) * period_s
    return expected_end(state, job, now) - now


def _best_counted(state: State, job: Job) -> Cycles | None:
    """The cycles of the deployment that has made most; None: no cycle was measured, or nothing says
    how many there are."""
    found = None
    for name in job.deployments:
        cycles = state.deployment(name).demand.cycles
        if cycles.expected and cycles.measured and (found is None or cycles.ended > found.ended):
            found = cycles
    return found


def _end_of_cycles(cycles: Cycles, left: float, now: float) -> float:
    total_s = 0.0
    for cycle in cycles.measured:
        total_s += cycle.length_s
    length_s = total_s / len(cycles.measured)
    since = now if cycles.open is None else cycles.open.started_at
    return since + _outlasted(length_s, now - since) + (left - 1.0) * length_s


def _outlasted(expected_s: float, lasted_s: float) -> float:
    """How long something takes that has lasted so long."""
    return expected_s if lasted_s <= expected_s else LATE * lasted_s

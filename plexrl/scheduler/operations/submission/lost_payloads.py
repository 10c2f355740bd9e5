"""Operations whose payload, or what was drawn of them, is damaged or missing in the blob store.

The router finds that out before it sends anything to the workers, so such a run changed nothing and
is no loss of a worker. What a generation had drawn before an interruption is drawn again. A payload
is asked again from the job's controller: its heartbeats list the operations, and a repeated
submission replaces the payload. Meanwhile the run is retried, in case the disk can be read again.
An attached controller has `ASKED_S` seconds; a detached one has until its job is cancelled. Then
the operation fails. An operation that a recovery repeats has succeeded before, so its job ends.
"""

from plexrl.errors import PayloadLostError, PlexRLError
from plexrl.ids import BlobRef, OperationId
from plexrl.scheduler.accounting.usage import discard
from plexrl.scheduler.operations.held.holding import requeue
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Job, State
from plexrl.wire.operations import MUTATING

ASKED_S = 120.0
"""Many heartbeats, and longer than a controller takes to find a cluster that was restarted."""


def is_awaited(state: State, operation: Operation, error: PlexRLError, now: float) -> bool:
    """Whether a run that ended with `error` is retried, because its payload may come again."""
    if not isinstance(error, PayloadLostError):
        return False
    if operation.payload_lost_at is None:
        operation.payload_lost_at = now
    job = state.job(state.deployment(operation.deployment).job)
    return not job.attached or now < operation.payload_lost_at + ASKED_S


def may_have_run(state: State, deployment: Deployment, operation: Operation) -> bool:
    """Whether the workers may have carried out a mutation whose payload is lost: a router that is
    gone had the run before. They start again from the state before it then, because a second run,
    or none, would be wrong if they have."""
    sent_at = deployment.work.sent_at(operation) or 0.0
    return operation.kind in MUTATING and sent_at < state.issued_at


def draw_again(
    step: Step,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
) -> bool:
    """Repeat a generation from its beginning if what it had drawn is lost. False: something else
    is; nothing has changed."""
    effects = step.effects
    if not isinstance(error, PayloadLostError) or operation.partial is None:
        return False
    if error.details.get("payload") != operation.partial:
        return False
    effects.discard(operation.partial)
    operation.partial = None
    discard(operation)
    deployment.work.end_run(operation.operation)
    requeue(step.state, deployment, operation, step.now)
    effects.touch_all(deployment.placement.groups)
    return True


def replace_payload(
    effects: Effects, deployment: Deployment, operation: Operation, payload: BlobRef | None
) -> None:
    """The operation was submitted again, with an equal payload: if its own is lost, this one takes
    its place, and the operation runs at once."""
    if operation.payload_lost_at is None or payload is None:
        return
    effects.discard(operation.payload)
    operation.payload = payload
    operation.payload_lost_at = None
    if deployment.wpg.backoff.code == PayloadLostError.code:
        deployment.wpg.backoff.clear()
    effects.touch_all(deployment.placement.groups)


def lost_payloads(state: State, job: Job) -> list[OperationId]:
    """The operations of a job whose payload its controller is to send again."""
    found: list[OperationId] = []
    for name in job.deployments:
        deployment = state.deployments[name]
        waiting = [
            *deployment.work.running,
            *deployment.work.queue,
            *deployment.work.replay.replaying,
        ]
        found += [
            operation
            for operation in dict.fromkeys(waiting)
            if state.operations[operation].payload_lost_at is not None
        ]
    return found

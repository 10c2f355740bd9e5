"""What is kept of the mutations of a WPG, and when their payloads are discarded."""

from plexrl.ids import OperationId
from plexrl.scheduler.rules.settings import Settings, Situation, Step
from plexrl.scheduler.state.deployment.replay_log import ReplayLog
from plexrl.scheduler.state.records import Deployment, State


def drop_log(step: Step, deployment: Deployment) -> None:
    """Drop the replay log: a recovery needs none of it."""
    _forget(step, deployment.work.replay.take_log())


def drop_past(step: Step, deployment: Deployment) -> None:
    """Drop what led to the durable version: a recovery needs none of it, or it is too much."""
    _forget(step, deployment.work.replay.take_past())


def retire_log(step: Step, deployment: Deployment, former_seq: int) -> None:
    """The durable version includes the replay log: a recovery needs the log only if that version is
    damaged or lost, so the log is kept as far as the bounds allow.

    `former_seq` is the previous durable version. Once half of the bounds is used, it becomes the
    earlier version from which the newest can be computed again, and moves to NVMe. What led to it
    is dropped only when it is there, or when twice the bounds are used: a power cut takes what is
    in host memory.
    """
    state, settings = step.state, step.settings
    replay = deployment.work.replay
    log_bytes = payload_bytes(state, replay.log)
    if replay.base_seq or not _is_kept(settings, *_sizes(replay, log_bytes)):
        if deployment.wpg.stored.is_on_nvme(replay.previous_seq):
            _begin_at_previous(step, deployment)
        if not _is_kept(settings, *_sizes(replay, log_bytes), bounds=2):
            drop_past(step, deployment)
    if not replay.past:
        lost = not former_seq and not replay.past_is_whole
        if lost or not _is_kept(settings, len(replay.log), log_bytes, bounds=2):
            drop_past(step, deployment)
            drop_log(step, deployment)
            return
    if not replay.previous_seq:
        replay.reach_back_to(former_seq)
    elif not replay.base_seq and replay.previous_seq < former_seq:
        since = after_previous(state, deployment) + replay.log
        if not _is_kept(settings, 2 * len(since), 2 * payload_bytes(state, since)):
            replay.prepare(former_seq)
    replay.retire(log_bytes)


def _sizes(replay: ReplayLog, log_bytes: int) -> tuple[int, int]:
    """Number and payload bytes of the operations that are kept, those of the log included."""
    return len(replay.past) + len(replay.log), replay.past_payload_bytes + log_bytes


def after_previous(state: State, deployment: Deployment) -> list[OperationId]:
    """The operations of `past` that lead from the earlier version to the durable one."""
    operations, previous_seq = state.operations, deployment.work.replay.previous_seq
    return [name for name in deployment.work.replay.past if operations[name].seq > previous_seq]


def _begin_at_previous(step: Step, deployment: Deployment) -> None:
    """Drop what led to the earlier version."""
    state = step.state
    replay = deployment.work.replay
    count = len(replay.past) - len(after_previous(state, deployment))
    nbytes = payload_bytes(state, replay.past[:count])
    _forget(step, replay.begin_at_previous(count, nbytes))


def forget_previous(step: Step, deployment: Deployment) -> None:
    """Forget the earlier versions: nodes that hold the durable one do not have them."""
    if not deployment.work.replay.past_is_whole:
        drop_past(step, deployment)
    deployment.work.replay.forget_previous()


def payload_bytes(state: State, names: list[OperationId]) -> int:
    """Payload bytes of these operations together."""
    operations = state.operations
    return sum([operations[name].payload_bytes for name in names])


def _is_kept(settings: Settings, count: int, nbytes: int, bounds: int = 1) -> bool:
    """Whether so many operations, with payloads of so many bytes, are kept to compute a version
    again, within so many times the bounds."""
    config = settings.config
    return (
        count <= bounds * config.rebuild_operations
        and nbytes <= bounds * config.rebuild_payload_bytes_max
    )


def _forget(step: Step, names: list[OperationId]) -> None:
    operations = step.state.operations
    for name in names:
        operation = operations[name]
        if operation.payload is not None:
            step.effects.discards.append(operation.payload)
        operation.is_logged = False
        if operation.is_forgotten:
            del operations[name]


def has_much_to_replay(situation: Situation, holder: Deployment) -> bool:
    """Whether a recovery would replay the maximum number of mutations or compute time."""
    log, config = holder.work.replay.log, situation.settings.config
    if len(log) >= config.snapshot_operations:
        return True
    operations, work_s = situation.state.operations, 0.0
    for name in log:
        work_s += operations[name].compute_s or 0.0
    return work_s >= config.snapshot_work_s


def leans_on_its_source(holder: Deployment, now: float) -> bool:
    """Whether the replay log of a forward deployment needs weights of a sync or load: these may be
    gone later, so it needs a snapshot now."""
    return (
        not holder.work.running
        and now >= holder.wpg.no_snapshot_until
        and bool(holder.work.replay.log)
    )

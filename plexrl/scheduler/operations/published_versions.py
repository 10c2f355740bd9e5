"""Published versions of a trainer's weights: which one a sync pulls, and from where."""

from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.deployment.wpg.stored_version import PublishedVersion
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.messages import PrefetchState


def has_published(state: State, trainer: DeploymentId) -> bool:
    """Whether a `publish` of the trainer made a version, which the nodes that it is on hold."""
    deployment = state.deployment(trainer)
    version = deployment.wpg.published
    return version is not None and version.nodes == deployment.placement.nodes


def note_published(step: Step, deployment: Deployment, operation: Operation) -> None:
    """Record what a `publish` made, and have the nodes that pulled earlier versions prefetch it."""
    trainer_step, nodes = deployment.work.trainer_step, deployment.placement.nodes
    version = PublishedVersion(seq=operation.seq, trainer_step=trainer_step, nodes=nodes)
    deployment.wpg.publish(version)
    readers = tuple(
        node for node in deployment.wpg.reader_nodes if node not in deployment.placement.nodes
    )
    if readers:
        step.effects.emit(
            PrefetchState(
                deployment=deployment.deployment,
                seq=operation.seq,
                nodes=readers,
                sources=statemanagers(step.state, deployment.deployment, operation.seq),
            )
        )


def find_sources(
    state: State, operation: Operation, reader: Deployment, *, replay: bool
) -> tuple[str, ...]:
    """The StateManagers from which a sync pulls; none for other operations. A replay pulls what its
    first run did."""
    if operation.source is None:
        return ()
    if operation.pulls_newest and not replay:
        _pull_newest(state, operation, reader)
    return statemanagers(state, operation.source, operation.source_seq)


def _pull_newest(state: State, sync: Operation, reader: Deployment) -> None:
    """Choose the version that a sync pulls: the newest at its start, which is kept longest."""
    assert sync.source is not None
    trainer = state.deployment(sync.source)
    version = trainer.wpg.published
    if version is None:
        return
    sync.source_seq, sync.source_step = version.seq, version.trainer_step
    for node in reader.placement.nodes:
        if node not in version.nodes and node not in trainer.wpg.reader_nodes:
            trainer.wpg.add_reader(node)


def wait_from_publish(state: State, reader: Deployment, name: OperationId) -> None:
    """A sync could not run before its trainer had published."""
    publish, burst = state.operations.get(name), reader.demand.burst
    if publish is not None and publish.finished_at is not None and burst.wants_since is not None:
        burst.want(max(burst.wants_since, publish.finished_at))


def statemanagers(state: State, trainer: DeploymentId, seq: int) -> tuple[str, ...]:
    """StateManagers of the nodes that hold a trainer's published version."""
    nodes, deployment = state.nodes, state.deployment(trainer)
    version = deployment.wpg.published
    holders = (
        version.nodes if version is not None and version.seq == seq else deployment.placement.nodes
    )
    return tuple(nodes[node].statemanager for node in holders if node in nodes)

"""Moving a WPG to other GPUs: repacking, drains, and relief of a job that waits too much.

`consider_repacking`, `consider_relief` or `drain` decides a move. The move waits for an operation
boundary and for a durable version, and ends in `finish`: the old processes stop, the WPG leaves its
group and joins another, its state follows if the nodes differ, and new processes start. No accepted
operation is lost: operations wait in the queue as for any switch.

A job is moved only if the gain within `REPACK_WINDOW_S` exceeds the cost by the factor
`HYSTERESIS`. Each move doubles the time before the next one, so a job cannot move back and forth
for ever.
"""

import math
from collections.abc import Callable
from typing import assert_never

from plexrl.ids import GroupId, NodeId
from plexrl.scheduler.accounting.profiler import forget_open_cycle, waiting_part
from plexrl.scheduler.accounting.sharing import note_wait
from plexrl.scheduler.operations.replay import forget_previous
from plexrl.scheduler.placement.borders import unite_all
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.overlaps import overlap_s
from plexrl.scheduler.placement.choice.scarcity import is_scarce
from plexrl.scheduler.placement.choice.search import GroupChoice, find, nearest
from plexrl.scheduler.placement.cluster import Cluster, Context
from plexrl.scheduler.placement.contention.colocation import is_colocated, own_group
from plexrl.scheduler.placement.contention.service_level import waiting_bound
from plexrl.scheduler.placement.placement import join, modes, place, vacate
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.rules.settings import Settings, Situation, Step
from plexrl.scheduler.rules.switch_cost import HOST, record_tier, round_trip_s
from plexrl.scheduler.state.demand.estimates import MOVE_BYTES_PER_S
from plexrl.scheduler.state.deployment.wpg.moves import MoveCause, Relocation
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.messages import MigrateState, ReleaseState, StopWorkers

REPACK_WINDOW_S = 3600.0
"""Time in which a move must pay."""

HYSTERESIS = 1.25
"""Minimum ratio of gain to cost."""

FREE_GROUP_VALUE = 0.25
"""Value of a freed GPU-second while no deployment waits for GPUs; 1 otherwise."""

LAUNCH_S = 30.0
"""Estimated start of new processes: imports, process group, building the model."""

CYCLES_MIN = 3
"""Measured cycles before the service level applies."""

BACK_OFF_S = 30.0
"""Delay before a move that found no capacity is tried again."""

REOPEN_PART = 0.8
"""A closed group opens again when all members wait less than this part of the bound."""


def holds_up_others(cluster: Cluster, deployment: Deployment) -> bool:
    """Whether it is alone on a group while others wait for its GPUs."""
    return (
        bool(cluster.queues.waiting)
        and bool(deployment.placement.groups)
        and _is_alone(cluster.state, deployment)
        and is_scarce(cluster, deployment)
    )


def consider_repacking(cluster: Cluster, deployment: Deployment, now: float) -> bool:
    """Move the deployment into the gaps of another group if that pays. True: it will move, and the
    next step of its group must be decided."""
    if not cluster.settings.policy.repacks or not may_move(cluster.settings, deployment, now):
        return False
    if any(is_colocated(cluster.state, group) for group in cluster.state.groups_of(deployment)):
        return False
    choice = _destination(cluster, deployment, MoveCause.REPACK, now)
    if choice is None:
        return False
    reason = f"repacked into the gaps of {choice.group}"
    _begin(cluster.queues, deployment, MoveCause.REPACK, reason)
    return True


def consider_relief(cluster: Cluster, deployment: Deployment, now: float) -> bool:
    """After a cycle: close the group if a member waits more than its job accepts, and move the one
    that is furthest past its bound. True: `deployment` will move, and the next step of its group
    must be decided."""
    if not deployment.placement.groups or not deployment.spec.shares:
        return False
    groups = cluster.state.groups_of(deployment)
    if all(len(group.members) == 1 and not group.is_closed for group in groups):
        return False
    state, settings = cluster.state, cluster.settings
    part, bound = _waiting(deployment), waiting_bound(cluster, deployment)
    if part <= bound:
        # Of an open group, the other members were checked at the end of their own cycles.
        for group in groups:
            is_less = group.is_closed and part < REOPEN_PART * bound
            if is_less and _may_reopen(cluster, group):
                group.is_closed = False
                cluster.capacity.inventory.refresh(group)
                cluster.queues.waiting.retry_all()
        return False
    for group in groups:
        if not group.is_closed and len(group.members) > 1:
            group.is_closed = True
            cluster.capacity.inventory.refresh(group)
    record = deployment.placement.record
    if record is None or now - record.at < settings.config.relief_after_s:
        return False
    members = {name: None for group in groups for name in group.members}
    if len(members) < 2 or any(
        _waiting(each) - waiting_bound(cluster, each) > part - bound
        for each in map(state.deployment, members)
    ):
        return False
    if not may_move(cluster.settings, deployment, now):
        return False
    if _destination(cluster, deployment, MoveCause.RELIEF, now) is None:
        return False
    reason = f"waited {part:.0%} of its time, the bound is {bound:.0%}"
    _begin(cluster.queues, deployment, MoveCause.RELIEF, reason)
    return True


def drain(cluster: Cluster, node: NodeId, now: float) -> list[GroupId]:
    """Move all deployments that can move off a drained node. Called again when capacity appears.
    Returns the groups of those that will move, whose next steps must be decided."""
    left = []
    for name in cluster.capacity.inventory.groups_on(node):
        for member in list(cluster.state.groups[name].members):
            deployment = cluster.state.deployment(member)
            if deployment.wpg.moves.planned is not None or now < deployment.wpg.moves.not_before:
                continue
            if _destination(cluster, deployment, MoveCause.DRAIN, now) is not None:
                reason = f"node {node!r} is drained"
                _begin(cluster.queues, deployment, MoveCause.DRAIN, reason)
                left.append(name)
    return left


def may_move(settings: Settings, deployment: Deployment, now: float) -> bool:
    """Whether the deployment may move: enough time has passed, doubled by each former move."""
    if deployment.wpg.moves.planned is not None or deployment.wpg.state != WpgState.READY:
        return False
    if now < deployment.wpg.moves.not_before:
        return False
    if deployment.wpg.moves.last_at is None:
        return True
    rest_s = settings.config.repack_interval_s * 2.0 ** min(deployment.wpg.moves.count, 10)
    return now - deployment.wpg.moves.last_at >= rest_s


def gain_s(cluster: Cluster, deployment: Deployment, choice: GroupChoice) -> float:
    """The gain of a move, in seconds of the deployment's group over `REPACK_WINDOW_S`."""
    assert deployment.demand.trace is not None
    frees = 0.0
    if _is_alone(cluster.state, deployment):
        frees = 1.0 if cluster.queues.waiting else FREE_GROUP_VALUE
    relief = (
        overlap_s(cluster.capacity, deployment) - choice.overlap_s
    ) / deployment.demand.trace.period_s
    return REPACK_WINDOW_S * (frees + relief)


def _is_alone(state: State, deployment: Deployment) -> bool:
    """Whether it is the only member of its groups."""
    return all(len(group.members) == 1 for group in state.groups_of(deployment))


def cost_s(state: State, deployment: Deployment) -> float:
    """The cost of a move in seconds: offload, transfer, load, and new processes."""
    over_s = deployment.spec.state_bytes / MOVE_BYTES_PER_S
    return LAUNCH_S + round_trip_s(state, deployment) + over_s


def is_due(state: State, deployment: Deployment) -> bool:
    """Whether a decided move can run: the WPG is between operations, its state is complete, and no
    rollout still has to pull its published weights."""
    return (
        deployment.wpg.moves.planned is not None
        and deployment.wpg.state == WpgState.READY
        and not deployment.work.running
        and not deployment.work.replay.replaying
        and deployment.wpg.moving is None
        and not _has_pending_pulls(state, deployment)
    )


def is_stopping(state: State, deployment: Deployment) -> bool:
    """Whether the deployment starts no more operations until it has moved. While others pull its
    weights it continues, because they may wait for its work."""
    return deployment.wpg.moves.planned is not None and not _has_pending_pulls(state, deployment)


def cancel_move(queues: Queues, deployment: Deployment, now: float) -> None:
    """Cancel a move that found no capacity. The WPG stays for at least `BACK_OFF_S`; the caller has
    its nodes checked again after that."""
    deployment.wpg.moves.postpone(now + BACK_OFF_S)
    queues.end_move(deployment)


def finish(context: Context, deployment: Deployment, now: float) -> bool:
    """Move after the offload, if there still is a destination. False: it stays."""
    state, cluster = context.state, context.cluster
    relocation = deployment.wpg.moves.planned
    assert relocation is not None, f"{deployment.deployment} is not relocating"
    deployment.wpg.moves.cancel()
    cluster.queues.end_move(deployment)
    choice = _destination(cluster, deployment, relocation.cause, now)
    if choice is None or deployment.placement.group is None:
        return False
    old_nodes = deployment.placement.nodes
    note_wait(state, deployment, now)
    context.effects.emit(
        StopWorkers(
            deployment=deployment.deployment,
            incarnation=deployment.wpg.processes.incarnation,
            nodes=old_nodes,
        )
    )
    deployment.work.replay.end_replay()
    forget_open_cycle(deployment)
    if deployment.work.queue:
        deployment.demand.burst.want(now)
    # The borders of its old groups may be those of the destination, so they go only afterwards.
    old_groups = deployment.placement.groups
    context.effects.touch_all(vacate(cluster, deployment, now, unites=False))
    if choice.mode == PlacementMode.DEDICATED:
        joined = place(cluster, deployment, now, only=(PlacementMode.DEDICATED,))
        assert joined is not None, "the destination search found free GPUs"
    else:
        join(cluster.capacity, deployment, choice, now)
    context.effects.touch_all(unite_all(cluster.capacity, old_groups, now))
    deployment.wpg.moves.done(relocation.reason, now)
    cluster.queues.waiting.retry_all()
    settle(context.step(now), deployment)
    return True


def settle(step: Step, deployment: Deployment) -> None:
    """After a change of GPUs: start the migration of the state, or let the workers launch."""
    # With several nodes, each holds the parts of its former ranks only, which may have moved.
    effects = step.effects
    held = set(deployment.wpg.stored.nodes) if len(deployment.wpg.stored.nodes) == 1 else set()
    missing = sorted(set(deployment.placement.nodes) - held)
    if deployment.work.replay.durable_seq and missing:
        deployment.wpg.await_copies(missing)
        send_migration(step, deployment)
    else:
        deployment.wpg.resume()
        _release_left_nodes(effects, deployment)


def send_migration(step: Step, deployment: Deployment) -> None:
    """Send (or resend) the order to copy the durable version to the nodes that lack it."""
    nodes = step.state.nodes
    alive = tuple(node for node in deployment.wpg.stored.awaited_nodes if nodes[node].alive)
    sources = tuple(nodes[node].statemanager for node in deployment.wpg.stored.nodes)
    if alive:
        step.effects.emit(
            MigrateState(
                deployment=deployment.deployment,
                seq=deployment.work.replay.durable_seq,
                sources=sources,
                nodes=alive,
                ranks=deployment.placement.ranks,
            )
        )


def migrated(step: Step, deployment: Deployment, node: NodeId) -> bool:
    """Note that a node has the durable version. True once all have, so the workers can launch."""
    effects = step.effects
    if (
        deployment.wpg.state != WpgState.MIGRATING
        or node not in deployment.wpg.stored.awaited_nodes
    ):
        return False
    if not deployment.wpg.stored.copied_to(node):
        return False
    _release_left_nodes(effects, deployment)
    deployment.wpg.stored.move_to(deployment.placement.nodes)
    # Only the durable version was copied.
    forget_previous(step, deployment)
    record_tier(deployment, HOST)
    deployment.wpg.resume()
    return True


def _begin(queues: Queues, deployment: Deployment, cause: MoveCause, reason: str) -> None:
    deployment.wpg.moves.plan(Relocation(reason=reason, cause=cause))
    queues.await_move(deployment)


def _release_left_nodes(effects: Effects, deployment: Deployment) -> None:
    """Release the state on nodes that the deployment has left."""
    here = deployment.placement.nodes
    gone = tuple(node for node in deployment.wpg.stored.nodes if node not in here)
    if gone:
        effects.emit(ReleaseState(deployment=deployment.deployment, nodes=gone))
        deployment.wpg.stored.keep_only(here)


def _has_pending_pulls(state: State, deployment: Deployment) -> bool:
    """Whether an unfinished sync needs weights that the deployment has published. A sync without
    GPUs may never finish, so it does not count."""
    operations = state.operations
    for name in state.job(deployment.job).deployments:
        other = state.deployment(name)
        if other.placement.group is None:
            continue
        for each in (*other.work.running, *other.work.queue):
            operation = operations[each]
            if operation.source != deployment.deployment:
                continue
            if operation.after is None:
                if operation.pulls_newest:
                    return True
                continue
            publish = operations.get(operation.after)
            if publish is None or publish.state.is_final:
                return True
    return False


def _destination(
    cluster: Cluster, deployment: Deployment, cause: MoveCause, now: float
) -> GroupChoice | None:
    """The destination of a move for this cause; None: there is none, or the move does not pay."""
    match cause:
        case MoveCause.REPACK:
            own = own_group(cluster.capacity, deployment)
            near = []
            if own is not None and own.is_worthwhile:
                near.append(GroupChoice(group=own.group.group, mode=PlacementMode.COLOCATED))
            near += nearest(cluster, deployment, now, strict=True, count=4)
            if not near and holds_up_others(cluster, deployment):
                near = nearest(cluster, deployment, now, strict=False, count=4)
            found = _reachable(cluster, deployment, near)
            if found and gain_s(cluster, deployment, found[0]) > HYSTERESIS * cost_s(
                cluster.state, deployment
            ):
                return found[0]
            return None
        case MoveCause.RELIEF:
            return _elsewhere(
                cluster,
                deployment,
                now,
                lambda choice: _relieves(cluster.capacity, deployment, choice),
            )
        case MoveCause.DRAIN:
            return _elsewhere(cluster, deployment, now, lambda _: True)
        case _:
            assert_never(cause)


def _relieves(capacity: Capacity, deployment: Deployment, choice: GroupChoice) -> bool:
    """Whether the deployment would wait less there."""
    groups = capacity.state.groups_of(deployment)
    rivals = len({name for group in groups for name in group.members}) - 1
    match choice.mode:
        case PlacementMode.DEDICATED:
            return rivals > 0
        case PlacementMode.STRICT:
            return True
        case PlacementMode.OVERLAP:
            return choice.overlap_s < overlap_s(capacity, deployment)
        case _:
            return len(capacity.state.groups[choice.group].members) < rivals


def _elsewhere(
    cluster: Cluster, deployment: Deployment, now: float, suits: Callable[[GroupChoice], bool]
) -> GroupChoice | None:
    """The best acceptable destination other than the present group."""
    for mode in modes(cluster, deployment, now):
        match mode:
            case PlacementMode.DEDICATED:
                gpus = cluster.capacity.inventory.find_gpus(deployment)
                reach = (
                    cluster.settings.config.migrates or gpus is None or not _has_state(deployment)
                )
                if gpus is not None and (
                    reach or {gpu.node for gpu in gpus} <= set(deployment.wpg.stored.nodes)
                ):
                    assert deployment.placement.group is not None
                    own = GroupChoice(group=deployment.placement.group, mode=mode)
                    if suits(own):
                        return own
            case PlacementMode.STRICT | PlacementMode.OVERLAP:
                strict = mode == PlacementMode.STRICT
                found = nearest(cluster, deployment, now, strict=strict, count=4)
                for choice in _reachable(cluster, deployment, found):
                    if suits(choice):
                        return choice
            case _:
                joined = find(cluster, deployment, mode, now)
                if joined is None or not _reachable(cluster, deployment, [joined]):
                    continue
                if suits(joined):
                    return joined
    return None


def _reachable(
    situation: Situation, deployment: Deployment, choices: list[GroupChoice]
) -> list[GroupChoice]:
    if situation.settings.config.migrates or not _has_state(deployment):
        return choices
    there = set(deployment.wpg.stored.nodes)
    return [
        choice
        for choice in choices
        if {
            gpu.node
            for name in (choice.group, *choice.beside)
            for gpu in situation.state.groups[name].gpus
        }
        <= there
    ]


def _has_state(deployment: Deployment) -> bool:
    return deployment.work.replay.durable_seq > 0 or deployment.wpg.residency == Residency.DEVICE


def _may_reopen(situation: Situation, group: Group) -> bool:
    """Whether all members wait for much less than their jobs accept."""
    state = situation.state
    for member in map(state.deployment, group.members):
        if _waiting(member) >= REOPEN_PART * waiting_bound(situation, member):
            return False
    return True


def _waiting(deployment: Deployment) -> float:
    """The part of its time that a member has waited since it joined its group."""
    record = deployment.placement.record
    since = -math.inf if record is None else record.at
    cycles = deployment.demand.cycles.measured
    if cycles and cycles[0].started_at < since:
        cycles = [cycle for cycle in cycles if cycle.started_at >= since]
    if len(cycles) < CYCLES_MIN:
        return 0.0
    return waiting_part(cycles) or 0.0

"""Checks of all invariants of the scheduler's state."""

from plexrl.scheduler.accounting.holdings import Holdings
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.operations import MUTATING, SUPERSEDING, OperationKind, OperationState

WITHOUT_LOCK = {OperationKind.SAVE_CHECKPOINT, OperationKind.OPTIM_STEP}


def check(context: Context) -> None:
    """Raises `AssertionError`, which names the first broken invariant."""
    cluster, state = context.cluster, context.state
    _check_for_stored(context.effects)
    cluster.capacity.inventory.check()
    cluster.queues.waiting.check()
    cluster.unmeasured.check(state)
    taken: dict[tuple[str, int], str] = {}
    for group in state.groups.values():
        residents = (*group.members, *group.fillers)
        assert residents, f"{group.group} has no members"
        for filler in group.fillers:
            assert state.deployments[filler].spec.preemptible, f"{filler} is no filler"
        for gpu in group.gpus:
            other = taken.setdefault((gpu.node, gpu.gpu), group.group)
            assert other == group.group, f"{gpu} is in {group.group} and in {other}"
        for member in residents:
            assert group.group in state.deployments[member].placement.groups, (
                f"{member} is elsewhere"
            )
        if group.holder is not None:
            assert group.holder in residents, f"{group.group} is held by a stranger"
        if group.incoming is not None:
            _check_incoming(state, state.deployments[group.incoming])
        for member in residents:
            deployment = state.deployments[member]
            if member != group.holder:
                # A checkpoint or a step of the stored state needs no lock.
                is_stored = deployment.wpg.residency is Residency.OFFLOADED
                kinds = {command.kind for command in deployment.work.running.values()}
                busy = (
                    (kinds - WITHOUT_LOCK if is_stored else kinds)
                    or deployment.wpg.moving
                    or deployment.work.replay.replaying
                )
                assert not busy, f"{member} runs without the lock of {group.group}"
                assert deployment.wpg.residency in (Residency.NONE, Residency.OFFLOADED), member
    ports: dict[tuple[str, int], str] = {}
    for deployment in state.deployments.values():
        _check_deployment(cluster.state, deployment)
        _check_groups(cluster.state, deployment)
        if deployment.wpg.processes.port and deployment.placement.group is not None:
            here = deployment.placement.ranks[0].node, deployment.wpg.processes.port
            other = ports.setdefault(here, deployment.deployment)
            assert other == deployment.deployment, f"{other} meets at {here} too"
    _check_in_flight(cluster.state)
    _check_placed(cluster.holdings)


def _check_for_stored(effects: Effects) -> None:
    """Check that what is queued for a stored state is looked for when its group is stepped."""
    for_stored = effects.for_stored
    missing = Effects(effects.state).for_stored.keys() - for_stored.keys()
    assert not missing, f"nobody looks for what {missing} could do"
    ended = for_stored.keys() - effects.state.deployments.keys()
    assert not ended, f"{ended} are looked for"


def _check_incoming(state: State, incoming: Deployment) -> None:
    """Check that a switch to a member is one of all its groups, and goes on."""
    groups = state.groups_of(incoming)
    name = incoming.deployment
    assert groups, f"{name} is incoming without groups"
    assert all(group.incoming == name for group in groups), f"{name} awaits some of its groups"
    assert any(group.holder is not None for group in groups), f"{name} awaits nobody"


def _check_groups(state: State, deployment: Deployment) -> None:
    """Check that a deployment is a resident of its groups, with a rank on each of their GPUs, and
    has the locks of all of them or of none."""
    name, groups = deployment.deployment, state.groups_of(deployment)
    if not groups:
        return
    gpus = [(gpu.node, gpu.gpu) for group in groups for gpu in group.gpus]
    assert [(rank.node, rank.gpu) for rank in deployment.placement.ranks] == gpus, (
        f"{name}: its ranks"
    )
    is_there = [name in group.members or name in group.fillers for group in groups]
    assert all(is_there), f"{name} is no member"
    held = [group for group in groups if group.holder == name]
    assert len(held) in (0, len(groups)), f"{name} holds some of its groups"
    assert len({each.token for each in held}) < 2, f"{name} has several tokens"


def _check_placed(holdings: Holdings) -> None:
    """Check that budgets see every deployment that is on a group."""
    state = holdings.state
    placed = [
        deployment
        for deployment in state.deployments.values()
        if deployment.placement.group is not None
    ]
    tenants = {each.deployment: state.jobs[each.job].tenant for each in placed}
    for tenant in {job.tenant for job in state.jobs.values()}:
        expected = {name for name, owner in tenants.items() if owner == tenant}
        assert set(holdings.placed(tenant)) == expected, f"{tenant} has {expected} on groups"


def _check_in_flight(state: State) -> None:
    """Check that the counts used by limits equal the operations that exist."""
    counted: dict[str, list[int]] = {}
    for operation in state.operations.values():
        if operation.is_counted:
            deployment = state.deployments[operation.deployment]
            for name in (f"d:{deployment.deployment}", f"t:{state.jobs[deployment.job].tenant}"):
                counted.setdefault(name, []).append(operation.payload_bytes)
    kept = {f"t:{name}": in_flight for name, in_flight in state.in_flight.items()}
    kept |= {f"d:{name}": each.work.in_flight for name, each in state.deployments.items()}
    for name, in_flight in kept.items():
        sizes = counted.pop(name, [])
        found = (in_flight.operations, in_flight.payload_bytes)
        assert found == (len(sizes), sum(sizes)), f"{name} counts {found}, there are {sizes}"
    assert not counted, f"nothing is kept of {sorted(counted)}"


def _check_deployment(state: State, deployment: Deployment) -> None:
    name = deployment.deployment
    placed = deployment.wpg.state not in (WpgState.WAITING, WpgState.STOPPED)
    assert placed == (deployment.placement.group is not None), f"{name}: placed and group disagree"
    assert len(set(deployment.work.queue)) == len(deployment.work.queue), f"{name}: queued twice"
    submitted = [state.operations[queued].submitted_at for queued in deployment.work.queue]
    assert submitted == sorted(submitted), f"{name}: the queue is not in the order of submission"
    for queued in deployment.work.queue:
        operation = state.operations[queued]
        assert operation.state == OperationState.PENDING, f"{queued} is queued as {operation.state}"
        assert queued not in deployment.work.running, f"{queued} waits and runs"
    for running, command in deployment.work.running.items():
        if not command.replay:
            assert state.operations[running].state == OperationState.RUNNING, running
    others = [
        state.operations[running]
        for running, command in deployment.work.running.items()
        if command.kind != OperationKind.GENERATE
    ]
    if len(deployment.work.running) > 1 and others:
        kinds = sorted(other.kind.value for other in others)
        assert len(others) == 1, f"{name} runs {kinds} at once"
        assert others[0].in_flight, f"{name} runs {kinds} beside generations"
    halting = [failure for failure in deployment.work.unacknowledged if failure.halts]
    if halting:
        failed_at = halting[0].at
        for queued in deployment.work.queue:
            operation = state.operations[queued]
            halted = operation.kind in MUTATING and not operation.internal
            assert not halted or operation.submitted_at <= failed_at, f"{queued} is not halted"
    _check_replay_log(state, deployment, is_placed=placed)


def _check_replay_log(state: State, deployment: Deployment, *, is_placed: bool) -> None:
    """Check that what a recovery would repeat leads to the present state."""
    name, replay = deployment.deployment, deployment.work.replay
    assert replay.durable_seq <= replay.completed_seq, f"{name}: durable is ahead"
    seqs = [state.operations[logged].seq for logged in replay.log]
    assert seqs == sorted(set(seqs)), f"{name}: the replay log is out of order: {seqs}"
    assert all(state.operations[logged].kind in MUTATING for logged in replay.log), name
    if is_placed and replay.completed_seq > replay.durable_seq:
        assert seqs, f"{name}: nothing rebuilds {replay.completed_seq}"
        assert seqs[-1] == replay.completed_seq, f"{name}: the log lacks its end"
    assert all(state.operations[logged].is_logged for logged in replay.log), name
    past = [state.operations[each].seq for each in replay.past]
    assert past == sorted(set(past)), f"{name}: what led to its version is out of order: {past}"
    assert all(seq <= replay.durable_seq for seq in past), f"{name}: {past} is not past"
    nbytes = sum(state.operations[each].payload_bytes for each in replay.past)
    assert replay.past_payload_bytes == nbytes, f"{name}: {replay.past_payload_bytes} bytes"
    previous, base = replay.previous_seq, replay.base_seq
    assert base < previous or not base, f"{name}: {base} is no base of {previous}"
    for earlier in filter(None, (base, previous)):
        assert earlier < replay.durable_seq, f"{name}: {earlier} is no earlier version"
        behind = [each for each in replay.past if state.operations[each].seq > earlier]
        first_behind = state.operations[behind[0]] if behind else None
        # A mutation that overwrites the whole state follows any version.
        leads_on = first_behind is not None and (
            first_behind.seq == earlier + 1 or first_behind.kind in SUPERSEDING
        )
        assert leads_on, f"{name}: nothing leads on from version {earlier}"
    if past:
        begins_at = base or previous
        assert replay.past_is_whole or begins_at + 1 == past[0], f"{name}: {past} is of no use"
        assert past[-1] == replay.durable_seq, f"{name}: what led to its version lacks its end"
    elif replay.durable_seq and replay.past_is_whole:
        first = state.operations[replay.log[0]] if replay.log else None
        overwrites = first is not None and first.kind in SUPERSEDING
        assert overwrites, f"{name}: nothing led to version {replay.durable_seq}"
    left = len(replay.log) - len(replay.replaying)
    assert replay.replaying == replay.log[left:], f"{name}: replays what is not logged"

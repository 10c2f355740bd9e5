"""A group's lock: the only module that writes its holder, incoming member, token and switches.

    FREE ── grant ──▶ HELD ── begin_switch ──▶ SWITCHING ── hand_over ──▶ HELD
    HELD, SWITCHING ── release ──▶ FREE
    FREE ── begin_switch ──▶ AWAITED ◀── vacate ── SWITCHING      AWAITED ── hand_over ──▶ HELD

A member has the locks of all its groups or of none. It gets them at once (`grant`, `hand_over`);
until then it is the incoming member of all of them, from one `begin_switch` on. So no two members
ever wait for each other's locks. While it holds them, they have one token.

Invariants: an incoming member is that of all its groups, one of which has another holder; a token
is never given twice.
"""

from collections.abc import Sequence

from plexrl.ids import FencingToken
from plexrl.scheduler.state.machines.lock_states import LockState, LockTrigger, next_state
from plexrl.scheduler.state.records import Deployment, Group, State


def lock_state(group: Group) -> LockState:
    """The state of the group's lock."""
    if group.holder is None:
        return LockState.FREE if group.incoming is None else LockState.AWAITED
    return LockState.HELD if group.incoming is None else LockState.SWITCHING


def fence(state: State, groups: Sequence[Group]) -> None:
    """Give the groups of one member a new token.

    No group had that token before: a late report from another group of the same WPG is then never
    taken for a report of its present run.
    """
    made = state.tokens_made
    for group in groups:
        if group.token > made:
            made = group.token
    state.tokens_made = made + 1
    for group in groups:
        group.token = FencingToken(made + 1)


def grant(state: State, member: Deployment) -> None:
    """Give the free locks of its groups to a member, under a new token."""
    groups = state.groups_of(member)
    for group in groups:
        next_state(lock_state(group), LockTrigger.GRANTED)
    fence(state, groups)
    for group in groups:
        group.holder = member.deployment


def begin_switch(state: State, member: Deployment) -> None:
    """Reserve the locks of its groups for a member; the offloads of their holders follow."""
    for group in state.groups_of(member):
        next_state(lock_state(group), LockTrigger.SWITCH_BEGAN)
        group.incoming = member.deployment


def end_switch(state: State, member: Deployment) -> None:
    """Leave the locks to their holders: the incoming member left, or an offload changed nothing."""
    for group in state.groups_of(member):
        if group.incoming == member.deployment:
            next_state(lock_state(group), LockTrigger.SWITCH_ENDED)
            group.incoming = None


def vacate(group: Group) -> None:
    """The holder is offloaded; the incoming member awaits the offloads on its other groups."""
    next_state(lock_state(group), LockTrigger.VACATED)
    group.holder = None


def hand_over(state: State, member: Deployment) -> None:
    """Give the locks of its groups to a member: of one group under the token of the offload that
    has just ended, of several under a new one."""
    groups = state.groups_of(member)
    for group in groups:
        next_state(lock_state(group), LockTrigger.HANDED_OVER)
        group.holder = member.deployment
        group.incoming = None
    if len(groups) > 1:
        fence(state, groups)


def release(group: Group) -> None:
    """Free the lock."""
    next_state(lock_state(group), LockTrigger.RELEASED)
    group.holder = group.incoming = None


def withdraw(state: State, member: Deployment) -> None:
    """Free the locks that the member holds; end the switch if it is the incoming member."""
    for group in state.groups_of(member):
        if group.holder == member.deployment:
            incoming = group.incoming
            if incoming is not None and state.deployments[incoming].placement.spans:
                end_switch(state, state.deployments[incoming])
            release(group)
    # The offloads of the holders go on; the locks are free when they are done.
    end_switch(state, member)


def count_offload(state: State, member: Deployment, seconds: float) -> None:
    """Count the first half of a context switch."""
    groups = state.groups_of(member)
    groups[0].switches += 1
    groups[0].switch_seconds += seconds
    for group in groups:
        group.switched = True


def count_load(state: State, member: Deployment, seconds: float) -> None:
    """Count a load, if it is the second half of a context switch."""
    groups = state.groups_of(member)
    if any(group.switched for group in groups):
        groups[0].switch_seconds += seconds
        for group in groups:
            group.switched = False


def is_switched(state: State, member: Deployment) -> bool:
    """Whether the member's load is the second half of a context switch."""
    return any(group.switched for group in state.groups_of(member))

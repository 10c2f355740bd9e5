"""A group's lock: the only module that writes its holder, incoming member, token and switches.

    FREE ── grant ──▶ HELD ── begin_switch ──▶ SWITCHING ── hand_over ──▶ HELD
    HELD, SWITCHING ── release ──▶ FREE

Invariants: an incoming member exists only while there is a holder; a token is never given twice.
"""

from plexrl.ids import DeploymentId, FencingToken
from plexrl.scheduler.state.machines.lock_states import LockState, LockTrigger, next_state
from plexrl.scheduler.state.records import Group, State


def lock_state(group: Group) -> LockState:
    """The state of the group's lock."""
    if group.holder is None:
        return LockState.FREE
    return LockState.HELD if group.incoming is None else LockState.SWITCHING


def fence(state: State, group: Group) -> None:
    """Give the group a new token.

    No group had that token before: a late report from another group of the same WPG is then never
    taken for a report of its present run.
    """
    state.tokens_made = max(state.tokens_made, group.token) + 1
    group.token = FencingToken(state.tokens_made)


def grant(state: State, group: Group, member: DeploymentId) -> None:
    """Give the free lock to a member, under a new token."""
    next_state(lock_state(group), LockTrigger.GRANTED)
    fence(state, group)
    group.holder = member


def begin_switch(group: Group, member: DeploymentId) -> None:
    """Reserve the lock for a member; the offload of the holder follows."""
    next_state(lock_state(group), LockTrigger.SWITCH_BEGAN)
    group.incoming = member


def end_switch(group: Group) -> None:
    """Leave the lock to its holder: the incoming member left, or the offload changed nothing."""
    next_state(lock_state(group), LockTrigger.SWITCH_ENDED)
    group.incoming = None


def hand_over(group: Group, member: DeploymentId) -> None:
    """Give the lock to a member, under the token of the offload that has just ended."""
    next_state(lock_state(group), LockTrigger.HANDED_OVER)
    group.holder = member
    group.incoming = None


def release(group: Group) -> None:
    """Free the lock."""
    next_state(lock_state(group), LockTrigger.RELEASED)
    group.holder = group.incoming = None


def withdraw(group: Group, member: DeploymentId) -> None:
    """Free the lock if the member holds it; end the switch if it is the incoming member."""
    if group.holder == member:
        release(group)
    elif group.incoming == member:
        # The offload of the holder goes on; the lock is free when it is done.
        end_switch(group)


def count_offload(group: Group, seconds: float) -> None:
    """Count the first half of a context switch."""
    group.switches += 1
    group.switch_seconds += seconds
    group.switched = True


def count_load(group: Group, seconds: float) -> None:
    """Count a load, if it is the second half of a context switch."""
    if group.switched:
        group.switch_seconds += seconds
        group.switched = False

"""How long an operation or a move may run before its workers count as hung.

A bound is a multiple of the slowest run of its kind, so it follows what is measured, and never less
than `operation_overdue_s`. It doubles with each replacement that did not help, so that a bound that
is too short for a deployment is soon long enough.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from plexrl.ids import OperationId
from plexrl.scheduler.operations.deadlines.durations import run_s, slowest_s
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.wire.operations import OperationKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plexrl.scheduler.rules.settings import Settings, Situation, Step
    from plexrl.scheduler.state.operation import Operation
    from plexrl.scheduler.state.records import Deployment, State
    from plexrl.wire.messages import Run

FACTOR: Final = 10.0
"""Bound of an operation as a multiple of its upper estimate: outputs of very different lengths, a
busy machine and a slow disk together stay far below it."""
FIRST_FACTOR: Final = 6.0
"""By how much the least bound is longer for a generation, and for a kind that the WPG has not run
yet: it may compile kernels, build communicators or read a model."""
DOUBLINGS_MAX: Final = 10
NAMED_PART: Final = 0.5
"""After this part of its bound a run is named as the condition `operation_overdue`."""


LAUNCH: Final = "launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedRun:
    """An operation or move that is under way on a WPG, or the start of its processes."""

    operation: OperationId
    """Empty for a start of processes."""
    kind: str
    """`launch`, or the kind of the operation."""
    is_move: bool
    """It moves the WPG's whole state; no other operation runs at the same time."""
    began_at: float
    """When it was sent to the workers, or sent again."""
    expected_s: float | None
    """None: unknown."""
    bound_s: float

    @property
    def expected_at(self) -> float | None:
        """When it was expected to end; None: unknown."""
        return None if self.expected_s is None else self.began_at + self.expected_s

    @property
    def due_at(self) -> float:
        """When its workers count as hung."""
        return self.began_at + self.bound_s

    def is_overdue(self, now: float) -> bool:
        """Whether people should know of it."""
        expected_s = self.expected_s or 0.0
        return now > self.began_at + max(expected_s, NAMED_PART * self.bound_s)


def watch(step: "Step", deployment: "Deployment") -> None:
    """Look at the deployment's runs from now on. No bound is shorter than the time until then, so
    one timer serves all of them."""
    deployment.work.watch(step.now + step.state.overdue_s)
    step.effects.wake(deployment.work.watch_at, timers.overdue(deployment.deployment))


def runs(situation: "Situation", deployment: "Deployment") -> "Iterator[BoundedRun]":
    """What is under way on the deployment's workers."""
    state, settings = situation.state, situation.settings
    moving = deployment.wpg.moving
    if moving is not None:
        yield _run(situation, deployment, moving, is_move=True)
    for command in deployment.work.running.values():
        yield _run(situation, deployment, command, is_move=False)
    if is_launching(state, deployment):
        yield BoundedRun(
            operation=OperationId(""),
            kind=LAUNCH,
            is_move=False,
            began_at=max(deployment.wpg.processes.launched_at, state.issued_at),
            expected_s=None,
            bound_s=_doubled(deployment, FIRST_FACTOR * settings.config.operation_overdue_s),
        )


def is_launching(state: "State", deployment: "Deployment") -> bool:
    """Whether the agents of all its ranks are to start its processes now."""
    if deployment.wpg.state not in (WpgState.LAUNCHING, WpgState.RECOVERING):
        return False
    if deployment.wpg.processes.launch_at is not None:
        return False
    nodes = state.nodes
    return all(nodes[rank.node].alive for rank in deployment.placement.ranks)


def _run(
    situation: "Situation",
    deployment: "Deployment",
    command: "Run",
    *,
    is_move: bool,
) -> BoundedRun:
    state = situation.state
    operation = state.operations[command.operation]
    expected_s = run_s(state, deployment, operation)
    return BoundedRun(
        operation=command.operation,
        kind=command.kind.value,
        is_move=is_move,
        # While a run's report could not arrive, it may have ended.
        began_at=max(deployment.work.sent_at(operation) or 0.0, state.issued_at),
        expected_s=expected_s,
        bound_s=_bound_s(situation.settings, deployment, operation, expected_s or 0.0),
    )


def _bound_s(
    settings: "Settings", deployment: "Deployment", operation: "Operation", expected_s: float
) -> float:
    least_s = settings.config.operation_overdue_s
    longest_s = slowest_s(deployment, operation)
    if longest_s is None or operation.kind is OperationKind.GENERATE:
        # A controller may pause a generation, of which the scheduler knows nothing.
        least_s, longest_s = FIRST_FACTOR * least_s, longest_s or 0.0
    return _doubled(deployment, max(least_s, FACTOR * max(longest_s, expected_s)))


def _doubled(deployment: "Deployment", bound_s: float) -> float:
    doublings = min(deployment.wpg.processes.overruns, DOUBLINGS_MAX)
    return float(bound_s * 2.0**doublings)

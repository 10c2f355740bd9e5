"""How a state machine's table is read: a pair that the table lacks is an error.

A table maps (state, trigger) to the next state. A trigger that changes nothing in a state is listed
as a transition from that state to itself, with its reason. The live service treats an illegal pair
as it treats any step that raises: the state stays as it was, and the step is journalled and
reported (`plexrl.scheduler.service.skipped_steps`).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

State = TypeVar("State", bound=StrEnum)
Trigger = TypeVar("Trigger", bound=StrEnum)


class IllegalTransitionError(Exception):
    """A trigger that a state machine's table does not list for the present state: a fault of the
    scheduler, never of a request."""

    def __init__(self, machine: str, state: StrEnum, trigger: StrEnum) -> None:
        super().__init__(f"the {machine} table has no transition for {trigger} in state {state}")


class Machine(Generic[State, Trigger]):
    """A state machine, by its table."""

    def __init__(self, name: str, table: Mapping[tuple[State, Trigger], State]) -> None:
        self._name = name
        self.after: dict[Trigger, dict[State, State]] = {}
        """By trigger, then by state: a lookup makes no tuple."""
        for (state, trigger), after in table.items():
            self.after.setdefault(trigger, {})[state] = after

    def next_state(self, state: State, trigger: Trigger) -> State:
        """The state after `trigger`.

        Raises:
            IllegalTransitionError: the table has no such pair.
        """
        try:
            return self.after[trigger][state]
        except KeyError:
            raise IllegalTransitionError(self._name, state, trigger) from None

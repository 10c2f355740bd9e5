"""Versions of a WPG's state, and the mutations that a recovery repeats.

Invariants:

* a WPG's mutations carry consecutive numbers, and `durable_seq` ≤ `completed_seq`;
* `log` holds exactly the mutations that lead from version `durable_seq` to `completed_seq`, oldest
  first.
"""

from dataclasses import dataclass, field

from plexrl.ids import OperationId


@dataclass(slots=True, kw_only=True)
class ReplayLog:
    """What rebuilds a WPG's state."""

    log: list[OperationId] = field(default_factory=list)
    """Completed mutations after `durable_seq`, oldest first."""
    past: list[OperationId] = field(default_factory=list)
    """Mutations that led to `durable_seq`, oldest first, in case that version is damaged or lost.
    They begin at the initial weights, or else at version `base_seq` or, without it, at
    `previous_seq`."""
    past_payload_bytes: int = 0
    """Payload bytes of the operations in `past`."""
    past_is_whole: bool = False
    """`past` and `log` together lead from the initial weights to the present state. False: there
    were too many, and some were dropped."""
    previous_seq: int = 0
    """An earlier complete version, which the same StateManagers keep while they have free space,
    and move to NVMe; `past` leads from it to `durable_seq`. 0: there is none."""
    base_seq: int = 0
    """A still earlier one, which takes its place until `previous_seq` is on NVMe: what is in host
    memory only does not survive a power cut. 0: there is none."""
    replaying: list[OperationId] = field(default_factory=list)
    """The part of `log` that the state on the GPUs still lacks."""
    sent_at: float = 0.0
    """When the last repetition was sent to the workers."""
    completed_seq: int = 0
    """Number of the last completed mutation."""
    durable_seq: int = 0
    """Version that the StateManagers hold whole; 0: the initial weights, which are rebuilt."""

    def append(self, operation: OperationId, seq: int) -> None:
        """A mutation was carried out."""
        self.completed_seq = seq
        self.log.append(operation)

    def supersede(self) -> None:
        """The next mutation overwrites the whole state; `log` and `past` are empty."""
        self.past_is_whole = True

    def begin_replay(self) -> None:
        """Version `durable_seq` was loaded."""
        self.replaying = self.log.copy()

    def end_replay(self) -> None:
        """The state on the GPUs is gone, or needs no operation of the log any more."""
        self.replaying.clear()

    def send(self, now: float) -> None:
        """A mutation is repeated."""
        self.sent_at = now

    def replayed(self, operation: OperationId) -> None:
        """A mutation was repeated."""
        self.replaying.remove(operation)

    def store(self) -> int:
        """The StateManagers hold the present state.

        Returns:
            The durable version before that.
        """
        former_seq = self.durable_seq
        self.durable_seq = self.completed_seq
        return former_seq

    def reach_back_to(self, seq: int) -> None:
        """`past` begins at version `seq`, or at the initial weights."""
        self.previous_seq = seq

    def prepare(self, seq: int) -> None:
        """Version `seq` is the earlier one from now on, and the former one its base."""
        self.base_seq = 0 if self.past_is_whole else self.previous_seq
        self.previous_seq = seq

    def forget_previous(self) -> None:
        """No StateManager holds earlier versions."""
        self.previous_seq = self.base_seq = 0

    def retire(self, payload_bytes: int) -> None:
        """The durable version includes the log, which has payloads of so many bytes."""
        self.past += self.log
        self.past_payload_bytes += payload_bytes
        self.log.clear()
        self.replaying.clear()

    def take_log(self) -> list[OperationId]:
        """Empty the log, and return what it held."""
        taken, self.log = self.log, []
        self.replaying.clear()
        return taken

    def take_past(self) -> list[OperationId]:
        """Empty `past`, and return what it held."""
        taken, self.past = self.past, []
        self.past_payload_bytes = 0
        self.past_is_whole = False
        self.forget_previous()
        return taken

    def begin_at_previous(self, count: int, payload_bytes: int) -> list[OperationId]:
        """`past` begins at version `previous_seq`: take its first `count` operations, which have
        payloads of so many bytes."""
        taken = self.past[:count]
        del self.past[:count]
        self.past_payload_bytes -= payload_bytes
        self.past_is_whole = False
        self.base_seq = 0
        return taken

    def fall_back(self, count: int, payload_bytes: int) -> None:
        """Version `previous_seq` is the durable one: the last `count` operations of `past`, which
        have payloads of so many bytes, are to be repeated."""
        at = len(self.past) - count
        self.log[:0] = self.past[at:]
        del self.past[at:]
        self.past_payload_bytes -= payload_bytes
        self.durable_seq = self.previous_seq
        self.previous_seq, self.base_seq = self.base_seq, 0

    def begin_again(self) -> None:
        """The initial weights are the durable version: all of `past` is to be repeated."""
        self.log[:0] = self.past
        self.past.clear()
        self.past_payload_bytes = 0
        self.durable_seq = 0
        self.forget_previous()

"""The state of a rollout as plain data, for the journal."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

import msgspec

from plexrl.errors import CorruptStateError, PlexRLError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    Abort,
    Interrupt,
    ParametersPushed,
    Pull,
    ReportDroppedGroup,
    ReportQueuedGroup,
    RolloutCommand,
    RolloutEvent,
    Route,
    SnapshotTaken,
    SwitchTp,
    Train,
)
from plexrl.rollout.service.instances.work import InstanceCommand, Instances, InstanceWork
from plexrl.rollout.service.journal.progress import RolloutProgress
from plexrl.rollout.service.journal.store import (
    Forgotten,
    GeneratedPart,
    JournalEntry,
    RolloutStore,
    decision_checksum,
)
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    trajectory_ids,
)
from plexrl.wire.codec import JsonObject
from plexrl.wire.tensors import Array

COMMANDS: dict[str, type[Any]] = {
    each.__name__: each for each in (Route, Interrupt, Abort, Pull, SwitchTp)
}
_HINTS = get_type_hints(InstanceWork)


@dataclass(slots=True)
class RolloutState:
    """Everything that follows from the events."""

    core: RolloutCoordinator
    instances: Instances
    progress: RolloutProgress
    seq: int = 0
    """Number of the latest event."""

    @classmethod
    def new(cls, order: RolloutOrder) -> "RolloutState":
        """Before the first event."""
        settings = order.settings()
        core = RolloutCoordinator(settings)
        progress = RolloutProgress(
            group_size=settings.staleness.ids_per_group, round=core.rounds.kind
        )
        return cls(core, Instances(), progress)

    @classmethod
    def stored(cls, order: RolloutOrder, store: RolloutStore) -> "RolloutState":
        """After the latest stored event.

        Raises:
            CorruptStateError: what is stored cannot have been written by a rollout service, or
                another version decided on the events in another way.
        """
        try:
            found = store.snapshot()
            state = cls.new(order) if found is None else cls.restored(order, *found)
            for seq, event, checksum in store.events():
                commands = state.core.handle(event)
                _check_decision(store, seq, event, commands, checksum)
                state.note(seq, event, commands)
        except CorruptStateError:
            raise
        except (PlexRLError, msgspec.MsgspecError, LookupError, TypeError) as error:
            raise CorruptStateError(
                f"{store.path} cannot be read: {error}: restore the file from a backup, or delete "
                "it to end its rollout"
            ) from error
        return state

    @classmethod
    def restored(cls, order: RolloutOrder, seq: int, plain: JsonObject) -> "RolloutState":
        """The state that `plain` was made of, after the event `seq`. Raises as msgspec."""
        return cls(
            RolloutCoordinator.restore(order.settings(), plain["core"]),
            _restored_instances(plain["instances"]),
            msgspec.convert(plain["progress"], RolloutProgress, str_keys=True),
            seq,
        )

    def plain(self) -> JsonObject:
        """The state as JSON values, which later events do not change."""
        return {
            "core": self.core.state(),
            "instances": _plain_instances(self.instances),
            "progress": msgspec.to_builtins(self.progress, str_keys=True),
        }

    def take(
        self,
        event: RolloutEvent,
        store: RolloutStore,
        *,
        parts: Sequence[GeneratedPart] = (),
        prompt: tuple[SampleGroupId, Array] | None = None,
        step: tuple[int, int] | None = None,
        order: RolloutOrder | None = None,
    ) -> tuple[JournalEntry, list[InstanceCommand]] | None:
        """Decides on an event: what is to be stored, and the commands for instances after that.
        None: it changed nothing. Raises as `RolloutCoordinator.handle`; nothing has changed
        then."""
        division = replace(self.core.trajectories.lengths.division)
        commands = self.core.handle(event)
        is_divided = division != self.core.trajectories.lengths.division
        if isinstance(event, SnapshotTaken) and not commands and not is_divided:
            return None
        last_batch = self.progress.batch
        orders = self.note(self.seq + 1, event, commands)
        is_due = (
            store.is_tail_long
            or order is not None
            or any(isinstance(command, Train) for command in commands)
        )
        entry = JournalEntry(
            seq=self.seq,
            event=event,
            commands=commands,
            parts=parts,
            prompt=prompt,
            step=step,
            order=order,
            forgotten=self._forgotten(event, commands, last_batch),
            snapshot=self.plain() if is_due else None,
        )
        return entry, orders

    def note(
        self, seq: int, event: RolloutEvent, commands: Sequence[RolloutCommand]
    ) -> list[InstanceCommand]:
        """Takes what `core` decided on an event; returns the commands for instances."""
        self.seq = seq
        self.progress.note(seq, event, commands, self.core)
        return self.instances.note(event, commands)

    def _forgotten(
        self, event: RolloutEvent, commands: Sequence[RolloutCommand], last_batch: Train | None
    ) -> list[Forgotten]:
        """The groups that the event says were trained, or that it made the core drop or abort."""
        groups = [command.group for command in commands if isinstance(command, ReportDroppedGroup)]
        if isinstance(event, ParametersPushed) and last_batch is not None:
            groups += sorted({trajectory.group for trajectory in last_batch.batch})
        queued = [command.group for command in commands if isinstance(command, ReportQueuedGroup)]
        size = self.progress.group_size
        return [
            *(Forgotten(group, trajectory_ids(group, size)) for group in groups),
            *(Forgotten(each, trajectory_ids(each, size), keeps_prompt=True) for each in queued),
        ]


def _check_decision(
    store: RolloutStore,
    seq: int,
    event: RolloutEvent,
    commands: Sequence[RolloutCommand],
    checksum: int | None,
) -> None:
    """Raises CorruptStateError: these are not, or may not be, the commands that were given."""
    if checksum is None:
        # Versions that stored no checksum differ from this one in what they decide on snapshots.
        if isinstance(event, SnapshotTaken):
            raise CorruptStateError(
                f"{store.path} was written by an earlier version, which did not store what it "
                f"decided on event {seq} ({type(event).__name__}): end its job with the version "
                "that wrote it, or delete the file to end its rollout"
            )
    elif checksum != decision_checksum(commands):
        raise CorruptStateError(
            f"{store.path}: this version decides in another way on event {seq} "
            f"({type(event).__name__}) than the one that wrote it, and does not know what the "
            "instances were told: start that version again and stop it with SIGTERM, which stores "
            "the state without events; or delete the file to end its rollout"
        )


def _plain_instances(instances: Instances) -> JsonObject:
    return {
        "work": {name: _plain_work(work) for name, work in instances.work.items()},
    }


def _plain_work(work: InstanceWork) -> JsonObject:
    plain: JsonObject = {}
    for field in fields(work):
        value = getattr(work, field.name)
        if field.name == "unanswered":
            value = [[type(command).__name__, command] for command in value]
        plain[field.name] = msgspec.to_builtins(value, str_keys=True)
    return plain


def _restored_instances(plain: JsonObject) -> Instances:
    instances = Instances()
    for name, work in plain["work"].items():
        found = {
            key: msgspec.convert(value, _HINTS[key], str_keys=True)
            for key, value in work.items()
            if key != "unanswered"
        }
        commands = [
            msgspec.convert(command, COMMANDS[kind]) for kind, command in work["unanswered"]
        ]
        instances.work[InstanceId(name)] = restored = InstanceWork(**found)
        restored.unanswered.extend(commands)
    return instances

"""A change of a rank's stored state in host memory, without its device (PlexRL §4.5.4).

The StateManager copies a version to memory that this process may write. What is made there is
stored as another version; the first one never changes. So a step that is cut off at any moment has
changed nothing.
"""

from collections.abc import Iterable

import msgspec

from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.client.rank_link import RankLink
from plexrl.statemanager.client.reports import MoveReport
from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.protocol.host_requests import BeginStep, SaveStep, UndoStep
from plexrl.wire.messages import SaveRequest


class StoredStep:
    """One step of one rank."""

    def __init__(self, link: RankLink, arena: HostArena, *, seq: int, stamp: str) -> None:
        """`arena` stands for the registered arena, up to the end of its last slice. The step begins
        with version `seq`, which has this stamp."""
        self._link = link
        self._arena = arena
        self._begin = BeginStep(seq=seq, stamp=stamp, arena_bytes=arena.nbytes)
        self.stored: tuple[int, str] | None = None
        """Seq and stamp (ETag) of the version that was made; absent: none yet."""

    def begin(self) -> frozenset[StatePart]:
        """Map a copy of the version to `arena` and to the registered host arena; returns its parts.

        Raises:
            StateLostError: the version is not on this node.
            ConflictError: another version took its place, or the state is on the device.
            StateTierFullError: the host tier has no space for a copy.
        """
        answer = self._link.borrow_step(self._begin, self._arena)
        return frozenset(map(StatePart, answer["parts"]))

    def save(self, order: SaveRequest, parts: Iterable[StatePart]) -> MoveReport:
        """Store the memory as version `order.seq`; from now on it is read-only.

        Raises:
            StateTierFullError: no tier has free space.
            ConflictError: the StateManager knows of no step: it was restarted.
        """
        host = self._link.host
        assert host is not None, "a step that was begun has host memory"
        self._arena.give_up()
        host.give_up()
        answer = self._link.call(SaveStep(order=order, parts=tuple(sorted(parts))))
        self.stored = order.seq, answer["stamp"]
        return msgspec.convert(answer, MoveReport)

    def undo(self) -> None:
        """Drop the version that was made, if one was: another rank has made none. A StateManager
        that cannot be reached keeps it until the next save.

        Raises:
            PlexRLError: the StateManager raised it, or did not come back in time.
        """
        made, self.stored = self.stored, None
        if made is not None:
            self._link.call(UndoStep(seq=made[0], stamp=made[1]))

    def end(self) -> None:
        """Unmap and return the memory, whatever happened."""
        self._arena.detach()
        self._link.return_step()

"""An optimizer step of the stored state, while another deployment has the GPUs (PlexRL §4.5.4).

Each rank's StateManager copies the offloaded version to host memory. The CPU steps it there, and
the result is stored as the next version, which the next load loads. It does so at a low priority:
the GPUs' holder has its workers on the same CPUs. The ranks agree before and
after the step, so either all of them have made the next version or none counts.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from plexrl.errors import ConflictError, PlexRLError, StaleTokenError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.wire.messages import SaveRequest
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult
from plexrl.worker.state.host.low_priority import LowPriorityThread
from plexrl.worker.state.rank_agreement import on_all_ranks

if TYPE_CHECKING:
    from plexrl.statemanager.client.stored_step import StoredStep


class StoredSteps:
    """Steps of one rank's stored state."""

    def __init__(self, backend: Backend, client: StateManagerClient) -> None:
        self._backend = backend
        self._client = client
        self._arena: HostArena | None = None
        """Addresses of a step's parameters and gradients; absent before the first one."""
        self._thread = LowPriorityThread()
        """The holder's workers, which feed the GPUs, go first."""

    def run(self, call: BackendCall, order: SaveRequest) -> BackendResult:
        """Step the offloaded version `order.keep_seq` and store the result as `order.seq`.

        Raises:
            ConflictError: the step needs the state on its device; on every rank.
            StateLostError: this is not the version that the processes offloaded; on every rank.
            StateTierFullError: a node has no space; on every rank.
            NonFiniteWeightsError: the step made weights that are not finite; on every rank.
        """
        if self._arena is None:
            nbytes = self._backend.stepped_bytes
            if not nbytes:
                raise ConflictError("this backend steps an optimizer on its device only")
            self._arena = HostArena(nbytes)
        arena = self._arena
        steps: list[StoredStep] = []

        def begin() -> None:
            steps.append(self._client.begin_step(arena, order.keep_seq))
            steps[0].begin()

        try:
            self._agree(begin)
            result = self._thread.run(lambda: self._backend.step_stored(call, arena))
            parts = self._backend.live_parts()
            self._agree(lambda: steps[0].save(order, parts))
        except BaseException:
            for step in steps:
                # What one rank has stored alone is of no use, and counts in the tenant's quota.
                with suppress(PlexRLError):
                    step.undo()
                step.end()
            raise
        steps[0].end()
        self._client.end_step(steps[0])
        return result

    def _agree(self, attempt: Callable[[], object]) -> None:
        def named() -> str:
            try:
                attempt()
            except StaleTokenError as error:
                # A restarted StateManager takes no registration of before the last switch.
                raise ConflictError(f"the StateManager does not know the step: {error}") from error
            return ""

        on_all_ranks(self._backend.gather, named)

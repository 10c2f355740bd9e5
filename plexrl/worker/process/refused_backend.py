"""What stands for a backend that this node cannot run.

The worker starts all the same, so that the first load is refused with the reason: a process that
ends before it is ready would only be started again.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.worker.process.backend import Backend, BackendCall
from plexrl.worker.process.backend_choice import make_backend

if TYPE_CHECKING:
    from plexrl.statemanager.client.host_arena import HostArena


def made_or_refused(
    spec: DeploymentSpec, rank: int, world_size: int, checkpoint_dir: Path
) -> Backend:
    """As `make_backend`; what that raises is raised by the backend's `build` instead."""
    try:
        return make_backend(spec, rank, world_size, checkpoint_dir)
    except InvalidRequestError as error:
        return RefusedBackend(error)


class RefusedBackend:
    """Every call raises the refusal; before a build that succeeds only `build` is called."""

    def __init__(self, refusal: InvalidRequestError) -> None:
        self._refusal = refusal

    @property
    def arena(self) -> Arena:
        self._refuse()

    @property
    def host_arena(self) -> "HostArena | None":
        self._refuse()

    def build(self) -> NoReturn:
        self._refuse()

    def slices(self) -> tuple[StateSlice, ...]:
        self._refuse()

    def live_parts(self) -> frozenset[StatePart]:
        self._refuse()

    def before_offload(self) -> NoReturn:
        self._refuse()

    def after_load(self, parts: frozenset[StatePart]) -> NoReturn:
        del parts
        self._refuse()

    def after_pull(self, *, seq: int, trainer_step: int) -> NoReturn:
        del seq, trainer_step
        self._refuse()

    def gather(self, value: str) -> list[str]:
        del value
        self._refuse()

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        del dtype
        self._refuse()

    def run(self, call: BackendCall) -> NoReturn:
        del call
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise self._refusal

"""A placeholder for a backend that this node cannot run.

The worker starts with this placeholder, so that the first load fails with the reason. The scheduler
would restart a process that ends before it is ready.
"""

from pathlib import Path
from typing import NoReturn

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.worker.process.backend import Backend, BackendCall
from plexrl.worker.process.backend_factory import make_backend


def make_or_refuse(
    spec: DeploymentSpec, rank: int, world_size: int, checkpoint_dir: Path
) -> Backend:
    """As `make_backend`, but an error of that function is raised by the backend's `build`."""
    try:
        return make_backend(spec, rank, world_size, checkpoint_dir)
    except InvalidRequestError as error:
        return RefusedBackend(error)


class RefusedBackend(Backend):
    """Every method raises the reason. A worker calls no other method before `build` succeeds."""

    def __init__(self, reason: InvalidRequestError) -> None:
        self._reason = reason

    def build(self) -> NoReturn:
        raise self._reason

    def slices(self) -> tuple[StateSlice, ...]:
        raise self._reason

    def live_parts(self) -> frozenset[StatePart]:
        raise self._reason

    def before_offload(self) -> NoReturn:
        raise self._reason

    def after_load(self, parts: frozenset[StatePart]) -> NoReturn:
        del parts
        raise self._reason

    def after_pull(self, *, seq: int, trainer_step: int) -> NoReturn:
        del seq, trainer_step
        raise self._reason

    def gather(self, value: str) -> list[str]:
        del value
        raise self._reason

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        del dtype
        raise self._reason

    def run(self, call: BackendCall) -> NoReturn:
        del call
        raise self._reason

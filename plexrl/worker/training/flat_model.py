"""The parts of a `TrainingModel` that are the same for every model whose state is a `FlatState`."""

from typing import TYPE_CHECKING, Any

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.worker.training.model import TrainingModel, TrainingRank

if TYPE_CHECKING:
    from plexrl.worker.training.flat_state import FlatState


class FlatModel(TrainingModel):
    """Base of the `fsdp` and `deepspeed` models. `build` sets `_model` and `_state`."""

    _model: Any
    _state: "FlatState"

    def __init__(self, rank: TrainingRank) -> None:
        self._rank = rank

    @property
    def arena(self) -> Arena:
        """As `TrainingModel.arena`."""
        return self._state.arena

    @property
    def host_arena(self) -> HostArena | None:
        """As `TrainingModel.host_arena`."""
        return self._state.host_arena

    @property
    def config(self) -> Any:
        """As `TrainingModel.config`."""
        return self._model.config

    @property
    def generation_config(self) -> Any:
        """As `TrainingModel.generation_config`."""
        return getattr(self._model, "generation_config", None)

    def slices(self) -> tuple[StateSlice, ...]:
        """As `TrainingModel.slices`."""
        return self._state.slices

    def zero_gradients(self) -> None:
        """As `TrainingModel.zero_gradients`."""
        self._state.gradients.zero_()

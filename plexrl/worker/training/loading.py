"""Loads a checkpoint, written under any layout, into a training model's arenas."""

from collections.abc import Callable

import torch

from plexrl.statemanager.checkpoint.places.choice import Location
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.checkpoint_files import fill_from_checkpoint, refuse_critic
from plexrl.worker.state.host.agreed_memory import memory_on_all_ranks
from plexrl.worker.state.host.optimizer import floats
from plexrl.worker.state.host.staging import HostStaging
from plexrl.worker.state.rank_agreement import on_all_ranks
from plexrl.worker.training.model import TrainingModel


def fill_state(
    model: TrainingModel, path: Location, *, optimizer: bool, gather: Callable[[str], list[str]]
) -> None:
    """Replace the parameters. Replace the optimizer state too if `optimizer`, else set it to zero.

    `TrainingModel.after_load` handles gradients and everything derived from the arenas. Raises as
    `fill_from_checkpoint`, `refuse_critic` and `memory_on_all_ranks`; the state is then unchanged.
    """

    def check() -> str:
        refuse_critic(path, model.spec.model)
        return ""

    on_all_ranks(gather, check)
    held = [piece for piece in model.slices() if piece.key.part != StatePart.GRADIENT]
    wants = [piece for piece in held if optimizer or piece.key.part != StatePart.OPTIMIZER]
    dropped = [piece for piece in held if not optimizer and piece.key.part == StatePart.OPTIMIZER]

    staging = HostStaging(model.arena)
    if model.host_arena is None:
        fill_from_checkpoint(path, wants, staging.memory, gather)
        staging.copy_in()
        for piece in dropped:
            view(model.arena, piece).zero_()
        return
    start = host_start(model.arena.nbytes)
    _fill_with_host(model.host_arena, start, path, wants, staging.memory, gather)
    staging.copy_in()


def _fill_with_host(
    host: HostArena,
    start: int,
    path: Location,
    wants: list[StateSlice],
    in_arena: Callable[[StateSlice], memoryview],
    gather: Callable[[str], list[str]],
) -> None:
    with memory_on_all_ranks(host, gather), host.writing() as at:
        whole = floats(at.target, host.nbytes).view(torch.uint8).numpy()
        if at.copies:
            # The padding between slices is zero too, and every step keeps it zero.
            whole.fill(0)

        def memory(piece: StateSlice) -> memoryview:
            if piece.arena_offset < start:
                return in_arena(piece)
            first = piece.arena_offset - start
            return memoryview(whole.data)[first : first + piece.nbytes]

        fill_from_checkpoint(path, wants, memory, gather)
        if all(piece.key.part != StatePart.OPTIMIZER for piece in wants):
            whole.fill(0)

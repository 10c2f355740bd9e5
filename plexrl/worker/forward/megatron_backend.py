"""The `megatron` backend of forward deployments: a model over several ranks, also rows of tokens.

It is the network of the `megatron` training backend without gradients and optimizer. A rank has its
part of the weights, in `dtype`; data ranks have the same. All ranks of a replica compute together.

Shapes: B rows of a micro-batch, L its longest row.
"""

from collections.abc import Mapping, Sequence

import torch

from plexrl.model.architecture.cut import splits_tokens
from plexrl.model.layout import check_cut, megatron_dimensions
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.worker.batches.logprobs import wanted_by_forward
from plexrl.worker.batches.packed_batches import micro_batches_of
from plexrl.worker.batches.packing import unpack_named
from plexrl.worker.batches.results import named_on_cpu
from plexrl.worker.forward.backend import ForwardBackend
from plexrl.worker.interface.backend import BackendCall, BackendResult
from plexrl.worker.models import LaidOutModel, lay_out_model
from plexrl.worker.state.arena_tensors import (
    ARENA_DTYPES,
    ArenaLayout,
    ParameterPiece,
    span,
    view,
)
from plexrl.worker.state.device import WorkerDevice
from plexrl.worker.training.megatron.groups import join_groups
from plexrl.worker.training.megatron.network.gpt import GptNetwork, make_network, place_parameters
from plexrl.worker.training.megatron.parameter_pieces import pieces_by_parameter
from plexrl.worker.training.megatron.pipeline import Pipeline
from plexrl.worker.training.megatron.shims import install_shims


class MegatronForwardBackend(ForwardBackend):
    """One rank. The default process group must exist before `lay_out`."""

    def lay_out(self) -> None:
        """Make this rank's part of the model, and give each of its weights an address.

        Raises:
            InvalidRequestError: Megatron cannot run the model.
            LayoutError: the layout cannot cut it.
        """
        spec, layout = self._spec, self._spec.layout
        coordinates = layout.coordinates(self._rank)
        laid_out = lay_out_model(spec.model)
        self._sizes = megatron_dimensions(laid_out.model.config.to_dict())
        check_cut(self._sizes, layout, spec.dtype)
        install_shims()
        join_groups(layout)
        head = spec.model.head
        rotary, dtype = laid_out.model.model.rotary_emb, getattr(torch, spec.dtype)
        self._network = make_network(self._sizes, layout, coordinates, rotary, dtype, head)
        self._network.requires_grad_(False)
        pieces = pieces_by_parameter(self._sizes, layout, coordinates, head)
        self._memory = _StageMemory(self._network, pieces, laid_out, spec.dtype, self._device)
        self.arena = self._memory.arena

    def materialise(self) -> None:
        super().materialise()
        layout = self._spec.layout
        self._pipeline = Pipeline(
            self._network,
            vocabulary=self._sizes.vocabulary,
            is_last=layout.coordinates(self._rank).pp == layout.pp - 1,
            place=self._device.place,
            token_multiple=layout.tp if splits_tokens(self._sizes, layout) else 1,
            head=self._spec.model.head,
        )

    def _forward(self, call: BackendCall) -> BackendResult:
        batches = [
            batch.placed(self._device.place)
            for batch in micro_batches_of(
                call.arrays, call.share.micro_batches, self._spec.layout.cp
            )
        ]
        values = named_on_cpu(self._pipeline.run(batches, None, wanted_by_forward(call.params)))
        if self._spec.model.head != "reward":
            tokens = len(call.arrays["tokens"]) if "tokens" in call.arrays else 0
            return BackendResult(arrays=unpack_named(batches, values, tokens))
        # A micro-batch without rows has one of padding.
        counts = call.arrays.get("micro_batch_rows", [0] * len(batches))
        pairs = zip(values, counts, strict=True)
        scores = torch.cat([each["scores"][: int(count)] for each, count in pairs])
        return BackendResult(arrays={"scores": scores.numpy()})


class _StageMemory:
    """The arena of one rank, and its parameters in it."""

    host_arena: HostArena | None = None

    def __init__(
        self,
        network: GptNetwork,
        pieces: Mapping[str, Sequence[ParameterPiece]],
        laid_out: LaidOutModel,
        dtype: str,
        device: WorkerDevice,
    ) -> None:
        self._network, self._laid_out = network, laid_out
        self._dtype, self._device = ARENA_DTYPES[dtype], device
        self._starts: dict[str, int] = {}
        layout = ArenaLayout()
        for name, parameter in network.named_parameters():
            start = self._starts[name] = layout.skip(parameter.numel(), self._dtype)
            for piece in pieces[name]:
                key = StateKey(part=StatePart.PARAMETER, name=piece.name)
                offset = start + parameter.itemsize * piece.start
                layout.place(key, piece, offset, self._dtype)
        self.slices: tuple[StateSlice, ...] = tuple(layout.slices)
        self.arena = device.make_arena(layout.nbytes)

    def materialise(self) -> None:
        """Write the weights to the arena, which has memory from now on, and let the network use
        them."""
        place_parameters(self._network, self._device.torch_device)
        for name, parameter in self._network.named_parameters():
            own = span(self.arena, self._starts[name], parameter.numel(), self._dtype)
            parameter.data = own.view(parameter.shape)
        self._network.requires_grad_(False)
        for piece in sorted(self.slices, key=lambda piece_: piece_.key.name):
            view(self.arena, piece).copy_(self._laid_out.read(piece.key.name, _index(piece)))
        self._laid_out.forget()

    def write(self, values: Mapping[StateSlice, torch.Tensor]) -> None:
        """Replace all parameters, by slice."""
        for piece in self.slices:
            view(self.arena, piece).copy_(values[piece])


def _index(piece: StateSlice) -> tuple[slice, ...]:
    ends = zip(piece.offset, piece.shape, strict=True)
    return tuple(slice(first, first + extent) for first, extent in ends)

"""Device memory of one GPU of a deployment, term by term. Pure.

Terms are those of the rank that needs most. State terms are exact to the padding of tensors;
activations are an estimate until a profile has measured them.

Not counted: pinned memory for transfers, which is host memory; and memory that the StateManager
keeps from an offload to the next load, because none is kept while a rank has memory.
"""

from typing import Final

import msgspec

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.memory.activations import activation_bytes, graph_bytes
from plexrl.model.memory.state_terms import StateTerms, state_terms

MIB: Final = 1 << 20

CONTEXT_BYTES: Final = 512 * MIB
"""A CUDA context with the kernels of torch, cuBLAS and NCCL, which `nvidia-smi` shows for an idle
process. An estimate: it differs by some 100 MiB between drivers and GPUs."""

COMMUNICATOR_BYTES: Final = 256 * MIB
"""Buffers of one NCCL communicator: 4 MiB (`NCCL_BUFFSIZE`) for each of at most 32 channels, for
receiving and sending. An estimate: NCCL uses fewer channels on most links."""

ACTIVATIONS: Final = "activations"
START: Final = "copies at the start"


class MemoryTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One summand."""

    name: str
    nbytes: int
    stays: bool = False
    """It stays on the device while the deployment is offloaded."""
    is_allocated: bool = False
    """It is memory of torch's allocator, of which workers measure the peak."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a deployment needs on each of its GPUs."""

    terms: tuple[MemoryTerm, ...]
    is_measured: bool = False
    """The activations are a measured peak."""
    start_bytes: int = 0
    """Bytes that a process that starts allocates besides the state, before it computes."""

    @property
    def need_bytes(self) -> int:
        """While it works."""
        return sum([term.nbytes for term in self.terms])

    @property
    def kept_bytes(self) -> int:
        """While it is offloaded, and others work."""
        return sum([term.nbytes for term in self.terms if term.stays])

    @property
    def activations(self) -> int:
        """The term of that name."""
        return sum([term.nbytes for term in self.terms if term.name == ACTIVATIONS])

    def measured(self, peak_bytes: int, gpu_memory_bytes: int) -> "DeviceMemory":
        """The same with a measured peak of torch's allocator: activations are what the peak has
        above the other terms that are allocated there. It was measured on a GPU of that memory, so
        no more than that is needed: contexts and buffers were estimated too high."""
        others = [term for term in self.terms if term.name not in (ACTIVATIONS, START)]
        known = sum([term.nbytes for term in others if term.is_allocated])
        room = max(0, gpu_memory_bytes - sum([term.nbytes for term in others]))
        activations = min(max(0, peak_bytes - known), room)
        found = MemoryTerm(name=ACTIVATIONS, nbytes=activations, is_allocated=True)
        return DeviceMemory(
            terms=_with_start((*others, found), self.start_bytes, room - activations),
            is_measured=True,
            start_bytes=self.start_bytes,
        )


def device_memory(spec: DeploymentSpec) -> DeviceMemory:
    """The memory that each GPU of the deployment needs, by its specification.

    Raises:
        InvalidRequestError: the model's configuration lacks a size.
    """
    state = state_terms(spec)
    groups = sum(size > 1 for size in _communicators(spec))
    terms = (
        *_state(state),
        MemoryTerm(name="gathered parameters", nbytes=state.gathered, is_allocated=True),
        MemoryTerm(
            name="KV cache",
            nbytes=state.kv_cache,
            # The built-in engine's is in the arena.
            is_allocated=spec.backend == "vllm",
        ),
        MemoryTerm(name=ACTIVATIONS, nbytes=activation_bytes(spec), is_allocated=True),
        MemoryTerm(name="CUDA graphs", nbytes=graph_bytes(spec), stays=True, is_allocated=True),
        MemoryTerm(name="CUDA context", nbytes=CONTEXT_BYTES, stays=True),
        MemoryTerm(name="communication", nbytes=groups * COMMUNICATOR_BYTES, stays=True),
    )
    known = tuple([term for term in terms if term.nbytes])
    return DeviceMemory(terms=_with_start(known, state.start), start_bytes=state.start)


def _with_start(
    terms: tuple[MemoryTerm, ...], start_bytes: int, room_bytes: int | None = None
) -> tuple[MemoryTerm, ...]:
    """With what the start needs beyond the memory in which the process computes later, but no more
    than `room_bytes`."""
    later = sum([term.nbytes for term in terms if term.is_allocated and not term.stays])
    excess = max(0, start_bytes - later)
    if room_bytes is not None:
        excess = min(excess, room_bytes)
    return (*terms, MemoryTerm(name=START, nbytes=excess)) if excess else terms


def _state(state: StateTerms) -> tuple[MemoryTerm, ...]:
    return (
        MemoryTerm(name="weights", nbytes=state.weights),
        MemoryTerm(name="gradients", nbytes=state.gradients),
        MemoryTerm(name="optimizer", nbytes=state.optimizer),
    )


def _communicators(spec: DeploymentSpec) -> tuple[int, ...]:
    """Ranks of each of a worker's communicators. Only training uses one over data ranks."""
    layout = spec.layout
    if spec.kind != "train":
        return (layout.tp, layout.pp, layout.ep)
    return (layout.dp * layout.cp, layout.tp, layout.pp, layout.cp, layout.ep)

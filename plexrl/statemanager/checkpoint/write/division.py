"""Which node writes which files of a checkpoint. Pure."""

from collections.abc import Sequence

from plexrl.statemanager.checkpoint.format.plan import PlannedFile
from plexrl.statemanager.checkpoint.format.tensors import WholeTensor
from plexrl.statemanager.layout.keys import DTYPE_BYTES


def divide(
    files: Sequence[PlannedFile], held_by: Sequence[str], writers: Sequence[str]
) -> list[list[PlannedFile]]:
    """The files of each writer, in the order of `files`. `held_by` has the address of the
    StateManager that holds each reader's version, `writers` those of the nodes that write.

    The largest file goes first, to the writer that holds most of it, among those that its bytes do
    not bring above an equal part; without such a writer, to the one with the fewest bytes. So no
    writer has more than an equal part and one file.
    """
    equal = sum(file.nbytes for file in files) / len(writers)
    loads = [0] * len(writers)
    chosen: dict[str, int] = {}
    for file in sorted(files, key=lambda each: (-each.nbytes, each.path)):
        held = _held_bytes(file, held_by)
        fitting = [i for i, load in enumerate(loads) if load + file.nbytes <= equal]
        if fitting:
            best = max(fitting, key=lambda i: (held.get(writers[i], 0), -loads[i], -i))
        else:
            best = min(range(len(writers)), key=lambda i: (loads[i], -held.get(writers[i], 0), i))
        loads[best] += file.nbytes
        chosen[file.path] = best
    return [[file for file in files if chosen[file.path] == index] for index in range(len(writers))]


def _held_bytes(file: PlannedFile, held_by: Sequence[str]) -> dict[str, int]:
    """Bytes of a file's tensors by the address that holds them; replicas count at each."""
    found: dict[str, int] = {}
    for tensor in file.tensors:
        for address, nbytes in _pieces(tensor.source, held_by):
            found[address] = found.get(address, 0) + nbytes
    return found


def _pieces(tensor: WholeTensor, held_by: Sequence[str]) -> list[tuple[str, int]]:
    itemsize = DTYPE_BYTES[tensor.dtype]
    return [(held_by[piece.reader], piece.box.size * itemsize) for piece in tensor.pieces]

"""The largest magnitude of each tensor that a published shard has, worked out once when asked for.

A published version never changes, so what was found is kept under its stamp.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.casts import NUMPY_DTYPES, amax_of
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.plan.columns import token_of
from plexrl.statemanager.store.versions.published import LeasedShard

VERSIONS_MAX = 64
BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class _Known:
    lock: threading.Lock = field(default_factory=threading.Lock)
    by_token: dict[str, float] = field(default_factory=dict)


class Amaxes:
    """Of the versions that were asked about lately. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def of(self, held: LeasedShard, tokens: Sequence[str]) -> list[float]:
        """Of each tensor; 0 of one of which the shard has nothing.

        Raises:
            InvalidRequestError: a tensor is of a dtype that has no F8 cast.
        """
        with self._lock:
            known = self._known.setdefault(held.manifest.stamp, _Known())
            self._known.move_to_end(held.manifest.stamp)
            while len(self._known) > VERSIONS_MAX:
                self._known.popitem(last=False)
        # Of several that ask at once, one works and the others find it done.
        with known.lock:
            missing = set(tokens) - set(known.by_token)
            if missing:
                known.by_token |= _worked_out(held, missing)
            return [known.by_token[token] for token in tokens]


def _worked_out(held: LeasedShard, tokens: set[str]) -> dict[str, float]:
    found = dict.fromkeys(tokens, 0.0)
    for piece in held.slices:
        token = token_of(piece.key)
        if token in tokens:
            found[token] = max(found[token], _amax(held, piece))
    return found


def _amax(held: LeasedShard, piece: StateSlice) -> float:
    if piece.dtype not in ("F32", "BF16"):
        raise InvalidRequestError(
            f"{piece.key.name} is held as {piece.dtype}, which is not cast to F8: publish it in "
            "F32 or BF16"
        )
    block = np.empty(min(BLOCK_BYTES, piece.nbytes), dtype=np.uint8)
    largest = 0.0
    for at in range(0, piece.nbytes, BLOCK_BYTES):
        part = block[: min(BLOCK_BYTES, piece.nbytes - at)]
        held.read_data(piece.arena_offset + at, part.data)
        largest = max(largest, amax_of(part.view(NUMPY_DTYPES[piece.dtype])))
    return largest

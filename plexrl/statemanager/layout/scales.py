"""Scales of F8 tensors: one for a whole tensor, whoever holds or wants which part of it. Pure.

A target that wants `layer.weight` in an F8 format and `layer.weight_scale` (one F32) beside it gets
every element divided by the scale as it is cast, and the scale, by which values are to be
multiplied where they are used. The scale brings the tensor's largest magnitude to the format's
largest value. The maximum of the shards' maxima is the tensor's, exactly, so all ranks of a target
come to the same scale, if all see shards that hold the whole tensor between them; that is checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.casts import F8_MAX, scale_of
from plexrl.statemanager.layout.keys import StateKey, StateSlice
from plexrl.statemanager.layout.plan.columns import DTYPES, F8_CODES, Ints, Layout, token_of
from plexrl.statemanager.layout.strided_copies import BYTES_CAST, Runs
from plexrl.statemanager.transfer.copy.strided_copy import Bytes

SUFFIX = "_scale"
"""Of a scale's name, behind its tensor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSlice:
    """A slice that is divided by a scale, and where the scale is wanted."""

    token: str
    """Of the tensor's key, as in layouts."""
    scale_token: str
    whole: StateSlice
    """All of the tensor."""
    dtype: str
    place: int
    scale_place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What a target wants, and which of it comes with scales."""

    all: Layout
    """Every slice, scales as tensors like others: of a source that has them so."""
    unscaled: Layout
    """Without the scales."""
    scaled: tuple[ScaledSlice, ...] = ()
    """In order of their places."""

    @classmethod
    def of(cls, slices: Sequence[StateSlice]) -> "Wants":
        """What `slices` ask for.

        Raises:
            InvalidRequestError: a scale is wanted that is not one F32.
        """
        layout = Layout.of(slices)
        f8 = {piece.key: piece for piece in slices if piece.dtype in F8_MAX and piece.nbytes}
        if not f8:
            return cls(all=layout, unscaled=layout)
        by_key = {piece.key: piece for piece in slices}
        scaled = []
        scale_keys = set()
        for piece in slices:
            key = StateKey(part=piece.key.part, name=piece.key.name + SUFFIX)
            scale = by_key.get(key)
            if piece.dtype not in F8_MAX or not piece.nbytes or scale is None:
                continue
            if scale.dtype != "F32" or scale.nbytes != 4:
                raise InvalidRequestError(
                    f"{key.name} is wanted as {scale.dtype}{list(scale.shape)}; a tensor has one "
                    "scale, in F32"
                )
            scale_keys.add(key)
            scaled.append(_scaled(piece, scale))
        unscaled = [piece for piece in slices if piece.key not in scale_keys]
        scaled.sort(key=lambda each: each.place)
        return cls(
            all=layout,
            unscaled=Layout.of(unscaled) if scaled else layout,
            scaled=tuple(scaled),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scales:
    """What each scaled slice of a target is divided by."""

    slices: tuple[ScaledSlice, ...]
    places: Ints
    """[slice], ascending."""
    values: tuple[float, ...]
    """[slice]"""

    @classmethod
    def of(cls, slices: tuple[ScaledSlice, ...], amaxes: Mapping[str, float]) -> "Scales":
        """From the largest magnitude of each tensor, by its token."""
        return cls(
            slices=slices,
            places=np.array([each.place for each in slices], dtype=np.int64),
            values=tuple(scale_of(amaxes[each.token], each.dtype) for each in slices),
        )

    def applied(self, runs: Runs) -> Runs:
        """The runs with the scale of the slice that each goes to; a run is of one tensor."""
        is_scaled = _is_to_f8(runs) & (runs.targets >= self.places[0])
        homes = np.searchsorted(self.places, runs.targets, "right") - 1
        bits = np.array(self.values, dtype=np.float64).view(np.int64)[homes]
        return replace(runs, scales=np.where(is_scaled, bits, runs.scales))

    def write(self, target: Bytes) -> None:
        """Put every scale where it is wanted."""
        for each, value in zip(self.slices, self.values, strict=True):
            place = each.scale_place
            target[place : place + 4].view(np.float32)[0] = value


def _scaled(piece: StateSlice, scale: StateSlice) -> ScaledSlice:
    whole = replace(
        piece,
        offset=(0,) * len(piece.global_shape),
        shape=piece.global_shape,
        arena_offset=0,
    )
    return ScaledSlice(
        token=token_of(piece.key),
        scale_token=token_of(scale.key),
        whole=whole,
        dtype=piece.dtype,
        place=piece.arena_offset,
        scale_place=scale.arena_offset,
    )


def _is_to_f8(runs: Runs) -> npt.NDArray[np.bool_]:
    is_cast: npt.NDArray[np.bool_] = runs.casts != BYTES_CAST
    return is_cast & np.isin(runs.casts % len(DTYPES), F8_CODES)

"""Choice of the versions from which a rank's state is loaded under another layout. Pure.

Invariants:

- All loaded versions are of one save: one seq, world size, token of the group lock, and set of
  parts. Versions of two saves never mix, even with equal seq.
- Every element is read once, even if it has replicas (`plexrl.statemanager.layout.plan.plan`).
- Elements keep their dtype.
"""

from collections.abc import Collection, Iterable, Sequence

from plexrl.errors import InvalidRequestError, StateLostError
from plexrl.statemanager.layout.keys import StateKey, StateSlice
from plexrl.statemanager.layout.versions import Manifest

_Save = tuple[int, int, tuple[str, ...]]
"""World size, token and parts."""


def saves(found: Sequence[Manifest]) -> list[list[int]]:
    """Group manifests of one deployment and seq by save. Returns indices, each rank once per save.

    Complete saves come first, then later tokens.
    """
    by_save: dict[_Save, dict[int, int]] = {}
    for index, manifest in enumerate(found):
        parts = tuple(part.value for part in manifest.parts)
        ranks = by_save.setdefault((manifest.world_size, manifest.token, parts), {})
        # This node's versions come first in the input, so the nearest version of a rank is taken.
        ranks.setdefault(manifest.rank, index)

    def order(save: _Save) -> tuple[bool, int, int, tuple[str, ...]]:
        is_whole = set(by_save[save]) >= set(range(save[0]))
        return (not is_whole, -save[1], save[0], save[2])

    return [
        [by_save[save][rank] for rank in sorted(by_save[save])]
        for save in sorted(by_save, key=order)
    ]


def wanted_slices(slices: Iterable[StateSlice], save: Manifest) -> tuple[StateSlice, ...]:
    """The slices of an arena that a version of this save contains."""
    parts = frozenset(save.parts)
    return tuple(piece for piece in slices if piece.key.part in parts and piece.nbytes)


def check_dtypes(wants: Iterable[StateSlice], held: Iterable[StateSlice]) -> None:
    """Check that wanted slices have the dtypes that were saved.

    Raises:
        InvalidRequestError: one does not.
    """
    dtypes: dict[StateKey, str] = {piece.key: piece.dtype for piece in held}
    for want in wants:
        dtype = dtypes.get(want.key, want.dtype)
        if dtype != want.dtype:
            raise InvalidRequestError(
                f"{want.key.name} was saved as {dtype} and the arena has it as {want.dtype}: load "
                "it into a model with the same dtypes",
                key=want.key.name,
            )


def lost_error(
    deployment: str, seq: int, found: Sequence[Manifest], why: str = ""
) -> StateLostError:
    """The error for a version of which not every part was found."""
    what = f"version {seq} of {deployment!r}"
    if not found:
        return StateLostError(
            f"{what} is not on this node: restore a checkpoint",
            deployment=deployment,
            seq=seq,
        )
    descriptions = [_describe([found[index] for index in save]) for save in saves(found)]
    return StateLostError(
        f"{what} is incomplete ({'; '.join(descriptions)}{f'; {why}' if why else ''}): "
        "restore a checkpoint",
        deployment=deployment,
        seq=seq,
    )


def _describe(save: Sequence[Manifest]) -> str:
    world_size = save[0].world_size
    missing = sorted(set(range(world_size)) - {manifest.rank for manifest in save})
    return (
        f"of the save by {world_size} ranks with token {save[0].token} "
        f"{f'ranks {_listed(missing)} are missing' if missing else 'every rank is present'}"
    )


def _listed(ranks: Collection[int], most: int = 16) -> str:
    shown = [str(rank) for rank in sorted(ranks)[:most]]
    return ", ".join(shown) + (" and more" if len(ranks) > most else "")

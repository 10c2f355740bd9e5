"""A rank's state out of versions that ranks of another layout left behind. Pure.

Laws:

- What is loaded is of one save: one seq, one number of ranks, one group lock's token, the same
  parts. Pieces of two saves are never put together, though they may have the same seq.
- Every element is brought once, whoever holds replicas of it
  (`plexrl.statemanager.layout.plan.plan`).
- Elements keep their dtype, unless a cast is asked for.
"""

from collections.abc import Collection, Iterable, Sequence

from plexrl.errors import InvalidRequestError, StateLostError
from plexrl.statemanager.layout.keys import StateKey, StateSlice
from plexrl.statemanager.store.versions.versions import Manifest

_Save = tuple[int, int, tuple[str, ...]]
"""World size, token and parts."""


def saves(found: Sequence[Manifest]) -> list[list[int]]:
    """Indices of manifests of one deployment and seq that are of one save each, a rank once; saves
    of which every rank is there come first, and of these the one of the latest token."""
    by_save: dict[_Save, dict[int, int]] = {}
    for index, manifest in enumerate(found):
        parts = tuple(part.value for part in manifest.parts)
        ranks = by_save.setdefault((manifest.world_size, manifest.token, parts), {})
        # What comes first in the input is nearest.
        ranks.setdefault(manifest.rank, index)

    def order(save: _Save) -> tuple[bool, int, int, tuple[str, ...]]:
        is_whole = set(by_save[save]) >= set(range(save[0]))
        return (not is_whole, -save[1], save[0], save[2])

    return [
        [by_save[save][rank] for rank in sorted(by_save[save])]
        for save in sorted(by_save, key=order)
    ]


def wanted(slices: Iterable[StateSlice], save: Manifest) -> tuple[StateSlice, ...]:
    """What of an arena's slices a version of this save brings."""
    parts = frozenset(save.parts)
    return tuple(piece for piece in slices if piece.key.part in parts and piece.nbytes)


def check_dtypes(wants: Iterable[StateSlice], held: Iterable[StateSlice]) -> None:
    """Refuse to load what was saved in another dtype.

    Raises:
        InvalidRequestError: it was.
    """
    dtypes: dict[StateKey, str] = {piece.key: piece.dtype for piece in held}
    for want in wants:
        dtype = dtypes.get(want.key, want.dtype)
        if dtype != want.dtype:
            raise InvalidRequestError(
                f"{want.key.name} was saved as {dtype} and the arena has it as {want.dtype}: load "
                "it into a model of the same dtypes, or ask for a cast",
                key=want.key.name,
            )


def lost(deployment: str, seq: int, found: Sequence[Manifest], why: str = "") -> StateLostError:
    """For a version whose pieces that are there do not make a whole."""
    what = f"version {seq} of {deployment!r}"
    if not found:
        return StateLostError(
            f"{what} is not on this node, nor on one that was named: restore a checkpoint",
            deployment=deployment,
            seq=seq,
        )
    told = [_told([found[index] for index in save]) for save in saves(found)]
    return StateLostError(
        f"{what} is not whole ({'; '.join(told)}{f'; {why}' if why else ''}): name the "
        "StateManagers that have the rest, or restore a checkpoint",
        deployment=deployment,
        seq=seq,
    )


def _told(save: Sequence[Manifest]) -> str:
    world_size = save[0].world_size
    missing = sorted(set(range(world_size)) - {manifest.rank for manifest in save})
    return (
        f"of the save by {world_size} ranks with token {save[0].token} "
        f"{f'ranks {_listed(missing)} are missing' if missing else 'every rank is there'}"
    )


def _listed(ranks: Collection[int], most: int = 16) -> str:
    shown = [str(rank) for rank in sorted(ranks)[:most]]
    return ", ".join(shown) + (" and more" if len(ranks) > most else "")

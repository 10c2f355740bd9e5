"""The dispatch plan: a batch to per-rank parts, and the parts' results to one answer. Pure.

Rows go to data-parallel ranks so that token counts are even; results come back in the order of the
rows. What has no rows is broadcast, and its result is taken from rank 0.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plexrl.wire.operations import DEFAULT_REDUCTION, LossSpec, OperationKind
from plexrl.wire.tensors import Array, Arrays

Plain = dict[str, Any]

TIERS = ("host", "nvme")
"""Of model state, the quickest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which rows each rank gets, in the order it gets them."""

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """Of all rows of the batch."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def split_rows(lengths: Sequence[int], ranks: int) -> Split:
    """Rows to ranks, longest first, each to the rank with the fewest tokens so far.

    Deterministic. The longest-processing-time rule keeps the fullest rank within 4/3 of the best.
    """
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens, rank = heapq.heappop(load)
        assigned[rank].append(row)
        heapq.heappush(load, (tokens + lengths[row], rank))
    return Split(
        rows=tuple(tuple(sorted(rows)) for rows in assigned),
        lengths=tuple(int(length) for length in lengths),
    )


def rank_arrays(arrays: Arrays, split: Split) -> list[Arrays]:
    """Each rank's part of a packed ragged batch (`tokens`, `lengths`, per-token arrays)."""
    places = [_places(split, rank) for rank in range(len(split.rows))]
    parts: list[Arrays] = []
    for rows, place in zip(split.rows, places, strict=True):
        part: Arrays = {name: array[place] for name, array in arrays.items() if name != "lengths"}
        part["lengths"] = arrays["lengths"][list(rows)]
        parts.append(part)
    return parts


def join_per_token(parts: Sequence[Array], split: Split) -> Array:
    """Per-token results of all ranks in the batch's own order, float32 `[T]`."""
    joined = np.zeros(split.tokens, dtype=np.float32)
    for rank, part in enumerate(parts):
        joined[_places(split, rank)] = part
    return joined


def micro_batch_count(split: Split, micro_batch_tokens: int) -> int:
    """Micro-batches that every rank runs so that none exceeds `micro_batch_tokens` with padding.

    All ranks run the same number, because each takes part in the others' collectives. A row longer
    than the bound makes a micro-batch of its own.
    """
    needed = 1
    for rows in split.rows:
        lengths = sorted(split.lengths[row] for row in rows)
        count = needed
        while count < len(lengths) and not _fits(lengths, count, micro_batch_tokens):
            count += 1
        needed = max(needed, count)
    return needed


def loss_denominator(loss: LossSpec, arrays: Arrays) -> float:
    """What the whole batch's loss is divided by; at least a tiny number, so that 0/0 is 0."""
    reduction = loss.reduction or DEFAULT_REDUCTION[loss.name]
    if reduction == "sum":
        return 1.0
    mask = arrays["mask"].astype(np.float64).copy()
    lengths = arrays["lengths"].astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    # The first token of a row is never predicted.
    mask[starts] = 0.0
    if reduction == "token_mean":
        return max(float(mask.sum()), 1e-9)
    rows = np.add.reduceat(mask, starts) if len(mask) else mask
    return max(float((rows > 0).sum()), 1e-9)


def gather_metrics(results: Sequence[Mapping[str, Any]]) -> Plain:
    """One answer of all ranks' `sums` and `maxes`: `{"metrics": {...}}`.

    `loss` is a sum already; every other sum is per token of the mask.
    """
    sums: dict[str, float] = {}
    maxes: dict[str, float] = {}
    for result in results:
        for name, value in result.get("sums", {}).items():
            sums[name] = sums.get(name, 0.0) + float(value)
        for name, value in result.get("maxes", {}).items():
            maxes[name] = max(maxes.get(name, float("-inf")), float(value))
    tokens = sums.pop("tokens", 0.0)
    metrics = {"loss": sums.pop("loss", 0.0), "tokens": tokens, **maxes}
    metrics |= {name: value / tokens if tokens else 0.0 for name, value in sums.items()}
    return {"metrics": metrics}


def gather_moves(results: Sequence[Mapping[str, Any]]) -> Plain:
    """One answer of all ranks' state moves: bytes added up, the longest time, all memory."""
    joined: Plain = dict(results[0])
    if "bytes_moved" in joined:
        joined["bytes_moved"] = sum(int(result["bytes_moved"]) for result in results)
        joined["seconds"] = max(float(result["seconds"]) for result in results)
        # The slowest tier that any rank met says what the move was like.
        joined["tier"] = max((str(result["tier"]) for result in results), key=TIERS.index)
    for name in ("memory_before", "memory_after"):
        if name in joined:
            joined[name] = [result[name] for result in results]
    return joined


def state_moved(kind: OperationKind, result: Mapping[str, Any]) -> Plain | None:
    """What the scheduler learns of a load or offload; None of anything else."""
    if kind not in (OperationKind.LOAD, OperationKind.OFFLOAD) or "bytes_moved" not in result:
        return None
    return {"bytes_moved": result["bytes_moved"], "tier": result["tier"]}


def _places(split: Split, rank: int) -> Array:
    """Indices into the packed batch of a rank's tokens, in the rank's order."""
    ends = np.cumsum(np.array(split.lengths, dtype=np.int64))
    rows = split.rows[rank]
    runs = [np.arange(ends[row] - split.lengths[row], ends[row]) for row in rows]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def _fits(lengths: Sequence[int], count: int, bound: int) -> bool:
    """Whether sorted rows cut into `count` groups, as workers cut them, stay within the bound."""
    groups = np.array_split(np.array(lengths), count)
    return all(len(group) <= 1 or len(group) * int(group[-1]) <= bound for group in groups)

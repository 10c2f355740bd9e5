"""Reductions: scalars of a whole batch, and one result from the results of all ranks. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plexrl.errors import DeviceMemoryFullError, NonFiniteWeightsError
from plexrl.wire.messages import Failed
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.messages.reports import StateMoved
from plexrl.wire.messages.workers import RunResult
from plexrl.wire.operations import DEFAULT_REDUCTION, LossSpec, OperationKind
from plexrl.wire.tensors import Array, Arrays, predicted

TIERS = ("host", "nvme")
"""Tiers of model state, fastest first."""


def loss_denominator(loss: LossSpec, arrays: Arrays) -> float:
    """The divisor of the whole batch's loss; at least a tiny number, so that 0/0 is 0."""
    reduction = loss.reduction or DEFAULT_REDUCTION[loss.name]
    if reduction in ("sum", "sequence_sum"):
        return 1.0
    if reduction == "token_mean":
        counted = predicted(arrays["mask"], arrays["lengths"])
        return max(float(counted.sum(dtype=np.float64)), 1e-9)
    rows = row_masks(arrays["mask"], arrays["lengths"])
    return max(float((rows > 0).sum()), 1e-9)


def row_masks(mask: Array, lengths: Array) -> Array:
    """The mask's sum over each row's predicted tokens, float64 `[rows]`."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    if not len(starts):
        return mask
    sums: Array = np.add.reduceat(predicted(mask, lengths), starts, dtype=np.float64)
    return sums


def gather_metrics(results: Sequence[Mapping[str, Any]]) -> RunResult:
    """Combine the output ranks' `sums` and `maxes`: `{"metrics": {...}}`.

    `loss` is already a sum; every other sum becomes a mean over the tokens of the mask. Each rank
    sums over the tokens of its own results, so ranks that replicate another must be left out.
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


def non_finite_error(kind: OperationKind, arrays: Arrays) -> NonFiniteWeightsError | None:
    """The error of an operation whose logprobs, scores or values are not finite; None: all are.

    Such numbers never reach a controller as a success. A diverged model has them on each backend
    and engine.
    """
    values = [arrays[name] for name in ("logprobs", "scores", "values") if name in arrays]
    if all(np.isfinite(each).all() for each in values):
        return None
    return NonFiniteWeightsError(
        f"{kind.value} computed numbers that are not finite with these weights: the training has "
        "diverged; load an earlier checkpoint, and lower the learning rate"
    )


def gather_moves(results: Sequence[Mapping[str, Any]]) -> RunResult:
    """Combine all ranks' state moves: bytes added, the longest time, every rank's memory.

    Every rank moves memory of its own, replicas too, so each rank counts once, also if its results
    do not.
    """
    joined: RunResult = dict(results[0])
    if "bytes_moved" in joined:
        joined["bytes_moved"] = sum(int(result["bytes_moved"]) for result in results)
        joined["seconds"] = max(float(result["seconds"]) for result in results)
        # The slowest tier of all ranks.
        joined["tier"] = max((str(result["tier"]) for result in results), key=TIERS.index)
    if "prefetched_bytes" in joined:
        joined["prefetched_bytes"] = sum(int(result["prefetched_bytes"]) for result in results)
        joined["prefetch_s"] = max(float(result["prefetch_s"]) for result in results)
    if "bytes_wanted" in joined:
        joined |= _gathered_sync(results, int(joined["bytes_moved"]))
    if "trainer_step" in joined:
        # A rank without parameters of its own makes no steps.
        joined["trainer_step"] = max(int(result["trainer_step"]) for result in results)
    for name in ("memory_before", "memory_after"):
        if name in joined:
            joined[name] = [result[name] for result in results]
    return joined


def _gathered_sync(results: Sequence[Mapping[str, Any]], moved: int) -> RunResult:
    """Combine the ranks' reports on a weight sync; each rank received weights of its own."""
    wanted = sum(int(result["bytes_wanted"]) for result in results)
    sources: dict[str, int] = {}
    for result in results:
        for transport, nbytes in result["sources"].items():
            sources[transport] = sources.get(transport, 0) + int(nbytes)
    ways = {str(result["way"]) for result in results}
    joined: RunResult = {
        "bytes_wanted": wanted,
        "fraction": moved / wanted if wanted else 1.0,
        "way": "delta" if "delta" in ways else "full",
        "sources": sources,
        "pause_s": max(float(result.get("pause_s", 0.0)) for result in results),
        "transfer_s": max(float(result.get("transfer_s", 0.0)) for result in results),
        "bytes_replicated": sum(int(result.get("bytes_replicated", 0)) for result in results),
    }
    if "digest" in results[0]:
        joined["digest"] = "-".join(str(result["digest"]) for result in results)
    return joined


def state_moved(kind: OperationKind, result: Mapping[str, Any]) -> StateMoved | None:
    """The report to the scheduler on a load or offload; None for other kinds."""
    if kind not in (OperationKind.LOAD, OperationKind.OFFLOAD) or "bytes_moved" not in result:
        return None
    return StateMoved(
        bytes_moved=result["bytes_moved"],
        tier=result["tier"],
        prefetched_bytes=result.get("prefetched_bytes", 0),
        prefetch_s=result.get("prefetch_s", 0.0),
    )


def cause_of(failed: Sequence[Failed]) -> ErrorView:
    """The error to report of ranks that failed. A lack of device memory goes first: others may have
    failed because a rank was refused, and the scheduler mends it."""
    errors = [reply.error for reply in failed]
    lacking = [error for error in errors if error["code"] == DeviceMemoryFullError.code]
    return (lacking or errors)[0]

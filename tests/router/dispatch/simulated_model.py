"""A fake model whose results depend on all earlier tokens, run whole or by the ranks of a plan.

Its "logprob" of a token combines the tokens up to it and the token's own per-token value. Under a
layout, context ranks combine the chunks of a row as attention would, using only their own inputs;
ranks whose results must not count return NaN.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from plexrl.router.dispatch.plan import DispatchPlan
from plexrl.wire.tensors import Array, Arrays

MODULUS = 1 << 20
"""Small enough that results are integers that float32 represents exactly."""


def batch(lengths: Sequence[int], seed: int = 0) -> Arrays:
    """A batch of random tokens, mask and advantages."""
    random = np.random.default_rng(seed)
    total = sum(lengths)
    return {
        "tokens": random.integers(0, 50_000, total, dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
        "mask": random.integers(0, 2, total).astype(np.float32),
        "advantages": random.integers(-8, 9, total).astype(np.float32),
    }


def run_whole(arrays: Arrays) -> tuple[Array, dict[str, float]]:
    """Results of all tokens, and the sums over them, in a single process."""
    results = np.zeros(len(arrays["tokens"]), dtype=np.float32)
    start = 0
    for length in arrays["lengths"].tolist():
        row = slice(start, start + length)
        results[row] = _row(arrays["tokens"][row], arrays["advantages"][row])
        start += length
    mask = arrays["mask"].copy()
    mask[np.cumsum(arrays["lengths"]) - arrays["lengths"]] = 0
    return results, _sums(results, mask)


def run_by_plan(plan: DispatchPlan, arrays: Arrays) -> tuple[dict[int, Array], list[Any]]:
    """Results of every rank, and the header results of the output ranks."""
    parts = plan.inputs(arrays)
    layout = plan.layout
    rings = [parts[first : first + layout.cp] for first in range(0, len(parts), layout.cp)]
    rows = [_rows_of(ring) if layout.cp > 1 else [] for ring in rings]
    answers: dict[int, Array] = {}
    headers = []
    for rank in range(layout.world_size):
        part, places = parts[plan.part_of(rank)], layout.coordinates(rank)
        if (places.pp, places.tp) != (layout.pp - 1, 0):
            answers[rank] = np.full(len(part["tokens"]), np.nan, dtype=np.float32)
            continue
        if layout.cp == 1:
            answers[rank], sums = run_whole(part)
        else:
            answers[rank] = _run_chunks(part, rows[places.dp], layout.cp)
            sums = _sums(answers[rank], part["mask"])
        headers.append({"sums": sums, "maxes": {}})
    return answers, headers


def _rows_of(ring: Sequence[Arrays]) -> list[Array]:
    """The whole rows of one data rank, from the chunks of its context ranks."""
    rows = [np.full(length, -1, dtype=np.int64) for length in ring[0]["lengths"].tolist()]
    for part in ring:
        for row, local in zip(rows, _local_rows(part, len(ring)), strict=True):
            positions = part["positions"][local]
            real = positions < len(row)
            assert (row[positions[real]] == -1).all(), "a token came twice"
            row[positions[real]] = part["tokens"][local][real]
    assert all((row >= 0).all() for row in rows), "a token came to no rank"
    return rows


def _run_chunks(part: Arrays, rows: Sequence[Array], cp: int) -> Array:
    results = np.zeros(len(part["tokens"]), dtype=np.float32)
    for row, local in zip(rows, _local_rows(part, cp), strict=True):
        targets = part["targets"][local]
        predicts = targets >= 0
        predicted = part["positions"][local][predicts] + 1
        assert (targets[predicts] == row[predicted]).all()
        mixed = _prefixes(row)[predicted] + part["advantages"][local][predicts].astype(np.int64)
        results[local][predicts] = mixed % MODULUS
    return results


def _local_rows(part: Arrays, cp: int) -> list[slice]:
    """Slice of each row among a context rank's tokens."""
    shares = -(-part["lengths"] // (2 * cp)) * 2
    ends = np.cumsum(shares).tolist()
    assert len(part["tokens"]) == len(part["positions"]) == (ends[-1] if ends else 0)
    return [slice(end - share, end) for end, share in zip(ends, shares.tolist(), strict=True)]


def _row(tokens: Array, advantages: Array) -> Array:
    results = ((_prefixes(tokens) + advantages.astype(np.int64)) % MODULUS).astype(np.float32)
    results[0] = 0
    return results


def _prefixes(tokens: Array) -> Array:
    """A number for each token that depends on its position and on all tokens up to it."""
    found: Array = np.cumsum(tokens.astype(np.int64) * (7919 * np.arange(1, len(tokens) + 1)))
    return found


def _sums(results: Array, mask: Array) -> dict[str, float]:
    exact = results.astype(np.float64)
    return {
        "loss": float((mask * exact).sum() / 1024),
        "tokens": float(mask.sum()),
        "logprob": float((mask * exact).sum()),
    }

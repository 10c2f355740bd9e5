"""The profile's segment tree, of two levels and wide nodes, beside a binary one."""

import random
import time

import numpy as np

from benchmarks.sizes import sized
from plexrl.scheduler.capacity.segment_tree import SegmentTree

SLOTS = 28_800
ROUNDS = sized(4_000, quick=20)
FREE_GPUS = 2_048


class BinaryTree:
    """The textbook's lazy segment tree with range-add and range-min, in plain Python."""

    def __init__(self, size: int, value: int) -> None:
        self._leaves = 1 << (size - 1).bit_length()
        self._low = [value] * (2 * self._leaves)
        self._lazy = [0] * (2 * self._leaves)

    def add(self, start: int, stop: int, delta: int) -> None:
        """Add `delta` to [start, stop)."""
        self._add(1, 0, self._leaves, start, stop, delta)

    def min(self, start: int, stop: int) -> int:
        """The smallest value in [start, stop)."""
        return self._min(1, 0, self._leaves, start, stop)

    def _add(self, node: int, low: int, high: int, start: int, stop: int, delta: int) -> None:
        if stop <= low or high <= start:
            return
        if start <= low and high <= stop:
            self._low[node] += delta
            self._lazy[node] += delta
            return
        middle = (low + high) // 2
        self._add(2 * node, low, middle, start, stop, delta)
        self._add(2 * node + 1, middle, high, start, stop, delta)
        self._low[node] = min(self._low[2 * node], self._low[2 * node + 1]) + self._lazy[node]

    def _min(self, node: int, low: int, high: int, start: int, stop: int) -> int:
        if stop <= low or high <= start:
            return 1 << 60
        if start <= low and high <= stop:
            return self._low[node]
        middle = (low + high) // 2
        left = self._min(2 * node, low, middle, start, stop)
        right = self._min(2 * node + 1, middle, high, start, stop)
        return min(left, right) + self._lazy[node]


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    rng = random.Random(1)
    ranges = []
    for _ in range(ROUNDS):
        start = rng.randrange(SLOTS - 1)
        ranges.append((start, rng.randrange(start + 1, SLOTS + 1)))
    wide, binary = SegmentTree(SLOTS, FREE_GPUS), BinaryTree(SLOTS, FREE_GPUS)
    wide_us = _work_us(wide, ranges)
    binary_us = _work_us(binary, ranges)
    began = time.perf_counter()
    for start, stop in ranges:
        wide.first_fit(start, stop - start, FREE_GPUS - 2)
    fit_us = (time.perf_counter() - began) / ROUNDS * 1e6
    pattern = np.zeros(SLOTS, dtype=np.int32)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        wide.add_pattern(pattern)
    pattern_us = (time.perf_counter() - began) / ROUNDS * 1e6
    figures = {
        "tree_add_min_us": wide_us,
        "tree_first_fit_us": fit_us,
        "tree_footprint_us": pattern_us,
        "tree_binary_ratio": binary_us / wide_us,
    }
    ratio = f"{binary_us / wide_us:.1f}x"
    return [
        ("segment tree, a range-add and a range-min", f"{wide_us:.1f} us", "", ratio),
        ("segment tree, first fit", f"{fit_us:.1f} us", "", ""),
        ("segment tree, a whole footprint", f"{pattern_us:.1f} us", "", ""),
    ], figures


def _work_us(tree: SegmentTree | BinaryTree, ranges: list[tuple[int, int]]) -> float:
    began = time.perf_counter()
    for number, (start, stop) in enumerate(ranges):
        tree.add(start, stop, -1 if number % 2 else 1)
        tree.min(start, stop)
    return (time.perf_counter() - began) / len(ranges) * 1e6

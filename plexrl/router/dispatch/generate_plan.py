"""Splits prompts over the replicas of a rollout, and joins the samples. Pure.

Each replica gets consecutive prompts, so the rows keep their order. A replica gets the index of
its first row and therefore draws what a single replica would draw. Only the first tensor rank of a
replica receives the prompts; it leads the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plexrl.model.parallelism import Parallelism
from plexrl.wire.operations import PROMPT_SAMPLING
from plexrl.wire.tensors import Arrays

STREAM_ORDERS = frozenset({"stream_order", "row_order"})
"""Arrays that a streamed generation's result has beside the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """One replica's part of a generation."""

    rank: int
    """Rank that leads the replica."""
    replica: int
    """Index of the replica."""
    first_prompt: int
    prompts: int
    """At least 1."""

    def inputs(self, arrays: Arrays) -> Arrays:
        """The replica's prompts out of the batch's arrays."""
        lengths = arrays["lengths"]
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        mine = slice(self.first_prompt, self.first_prompt + self.prompts)
        tokens = arrays["tokens"][starts[mine.start] : starts[mine.stop]]
        settings = {name: arrays[name][mine] for name in PROMPT_SAMPLING if name in arrays}
        return {"lengths": lengths[mine], "tokens": tokens, **settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePlan:
    """Which replica generates which samples."""

    shares: tuple[ReplicaShare, ...]
    """In the order of the prompts; replicas without prompts are left out."""
    samples_per_prompt: int

    def first_row(self, share: ReplicaShare) -> int:
        """Index of a replica's first sample among all samples, in the order of the prompts."""
        return share.first_prompt * self.samples_per_prompt

    def join_arrays(self, parts: Sequence[Arrays]) -> Arrays:
        """Concatenate the samples of all shares. Of a stream, `stream_counts` has the entries of
        each share: int32 `[shares]`."""
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for name in STREAM_ORDERS & joined.keys():
            counts = [len(part[name]) for part in parts]
            joined["stream_counts"] = np.array(counts, dtype=np.int32)
        return joined

    def join_results(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the results: preemptions are added, of other metrics the largest value counts.
        `streams` has replica and name of each share's stream."""
        joined: dict[str, Any] = dict(results[0])
        metrics: dict[str, float] = {}
        for result in results:
            for name, value in result.get("metrics", {}).items():
                so_far = metrics.get(name, 0)
                metrics[name] = so_far + value if name == "preemptions" else max(so_far, value)
        segments = [
            [self.first_row(share) + row, start, *drawn_by]
            for share, result in zip(self.shares, results, strict=True)
            for row, start, *drawn_by in result.get("segments", ())
        ]
        streams = [
            [share.replica, result["stream"]]
            for share, result in zip(self.shares, results, strict=True)
            if "stream" in result
        ]
        joined.pop("stream", None)
        return (
            joined
            | {"metrics": metrics}
            | ({"segments": segments} if segments else {})
            | ({"streams": streams} if streams else {})
        )


def plan_generate(layout: Parallelism, prompts: int, samples_per_prompt: int) -> GeneratePlan:
    """Give each replica the same number of prompts, to within one."""
    bounds = [prompts * index // layout.dp for index in range(layout.dp + 1)]
    shares = tuple(
        ReplicaShare(rank=rank, replica=replica, first_prompt=first, prompts=last - first)
        for replica, (rank, first, last) in enumerate(
            zip(layout.output_ranks, bounds[:-1], bounds[1:], strict=True)
        )
        if last > first
    )
    return GeneratePlan(shares=shares, samples_per_prompt=samples_per_prompt)

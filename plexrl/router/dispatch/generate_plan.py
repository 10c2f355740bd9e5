"""Prompts shared out over the replicas of a rollout, and their samples put together. Pure.

Each replica gets prompts that follow each other, so rows keep their order and, told the number of
their first one, draw what they would on a single replica. Tensor ranks behind a replica's first one
are sent nothing: it leads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plexrl.model.parallelism import Parallelism
from plexrl.wire.tensors import Arrays

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """One replica's part of a generation."""

    rank: int
    """That leads it."""
    first_prompt: int
    prompts: int
    """At least 1."""

    def inputs(self, arrays: Arrays) -> Arrays:
        """Its prompts."""
        lengths = arrays["lengths"]
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        mine = slice(self.first_prompt, self.first_prompt + self.prompts)
        tokens = arrays["tokens"][starts[mine.start] : starts[mine.stop]]
        return {"lengths": lengths[mine], "tokens": tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePlan:
    """Who generates what."""

    shares: tuple[ReplicaShare, ...]
    """In the order of the prompts; only replicas that have any."""
    samples_per_prompt: int

    def first_row(self, share: ReplicaShare) -> int:
        """Number of a replica's first sample, in the order of the prompts."""
        return share.first_prompt * self.samples_per_prompt

    def join_arrays(self, parts: Sequence[Arrays]) -> Arrays:
        """All samples, given those of each share."""
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def join_results(self, results: Sequence[Mapping[str, Any]]) -> Plain:
        """One result: what is counted adds up, of budgets and uses it is the fullest worker's."""
        joined: Plain = dict(results[0])
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
        return joined | {"metrics": metrics} | ({"segments": segments} if segments else {})


def plan_generate(layout: Parallelism, prompts: int, samples_per_prompt: int) -> GeneratePlan:
    """Gives each replica as many prompts as the others, to within one."""
    bounds = [prompts * place // layout.dp for place in range(layout.dp + 1)]
    shares = tuple(
        ReplicaShare(rank=rank, first_prompt=first, prompts=last - first)
        for rank, first, last in zip(layout.output_ranks, bounds[:-1], bounds[1:], strict=True)
        if last > first
    )
    return GeneratePlan(shares=shares, samples_per_prompt=samples_per_prompt)

"""Generates traces from a workload's distributions; equal seeds give equal bytes.

Each quantity has its own random generator, so that changing one distribution leaves the other
columns unchanged.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, islice
from random import Random
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.traces.generate.distributions import STANDARD, Distribution
from plexrl.traces.generate.published import MODEL_CLASSES, ModelClass, class_of_size, cycles_in
from plexrl.traces.generate.workload import CAP_S, Workload
from plexrl.traces.schema import ResponseLength, TraceJob

SPREAD = 0.15
"""Sigma of the logarithm of a job's cycle durations relative to the published ones."""

SHARED = 0.5
"""Correlation of a job's rollout and training work, since long responses extend both."""

GROUP_CORRELATION = 0.5
"""Correlation of the normal scores of response lengths to one prompt. This is an assumption, since
no public trace has groups."""


def generate_jobs(
    workload: Workload,
    *,
    seed: int,
    jobs: int | None = None,
    span_s: float | None = None,
    cap_s: float = CAP_S,
    profiles: bool = True,
) -> Iterator[TraceJob]:
    """Jobs of a workload in order: a number of them, or those that arrive within a span. With
    `profiles` each job has the published RL profile of its class or of its size.

    Raises:
        InvalidRequestError: only a span limits a workload whose jobs all arrive at once.
    """
    if jobs is None and workload.gap.quantile(1.0) <= 0:
        raise InvalidRequestError("these jobs all arrive at once: give their number")
    endless = _endless(workload, seed, cap_s, profiles)
    for job in islice(endless, jobs):
        if span_s is not None and job.submit_s > span_s:
            return
        yield job


def with_profiles(jobs: Iterable[TraceJob], *, seed: int) -> Iterator[TraceJob]:
    """Jobs of a public trace with the cycles of the published RL profile for their size. A job has
    at least one whole cycle, and its duration becomes a multiple of the cycle. Jobs with segments
    stay unchanged."""
    for job in jobs:
        if job.segments:
            yield job
            continue
        random = Random(f"{seed}:profile:{job.job_id}")
        demand = _demand(MODEL_CLASSES.get(job.model) or class_of_size(job.gpus), random)
        cycles = job.cycles or cycles_in(job.service_s, demand["period_s"])
        duration_s = round(cycles * demand["period_s"], 3)
        yield replace(job, **demand, cycles=cycles, duration_s=duration_s)


def generate_lengths(
    distribution: Distribution,
    *,
    seed: int,
    prompts: int,
    samples_per_prompt: int = 8,
    correlation: float = GROUP_CORRELATION,
) -> Iterator[ResponseLength]:
    """Responses in one group per prompt, with lengths of this distribution over all prompts.

    Lengths within a group are correlated by a Gaussian copula: `correlation` is of the normal
    scores of any two.
    """
    random = Random(f"{seed}:lengths")
    shared, own = math.sqrt(correlation), math.sqrt(1.0 - correlation)
    for prompt in range(prompts):
        common = random.gauss(0.0, 1.0)
        for _ in range(samples_per_prompt):
            score = shared * common + own * random.gauss(0.0, 1.0)
            length = distribution.quantile(STANDARD.cdf(score))
            yield ResponseLength(group=f"prompt-{prompt:06d}", output_tokens=max(1, round(length)))


def _endless(workload: Workload, seed: int, cap_s: float, profiles: bool) -> Iterator[TraceJob]:
    gaps, kinds, sizes, lengths, owners = (
        Random(f"{seed}:{name}") for name in ("gaps", "kinds", "sizes", "durations", "tenants")
    )
    classes = _ends(size.weight for size in workload.sizes)
    tenants = _ends(weight for _, weight in workload.tenants)
    clock_s = 0.0
    number = 0
    while True:
        size = workload.sizes[_pick(classes, kinds)]
        gpus = int(size.gpus.quantile(sizes.random()))
        duration_s = min(cap_s, max(1.0, round(size.duration.quantile(lengths.random()), 3)))
        job_id = f"job-{number:06d}"
        fields: dict[str, Any] = {"duration_s": duration_s}
        if profiles:
            model = MODEL_CLASSES[size.model] if size.model else class_of_size(gpus)
            fields |= _demand(model, Random(f"{seed}:profile:{job_id}"))
            fields["cycles"] = cycles_in(duration_s, fields["period_s"])
            fields["duration_s"] = round(fields["cycles"] * fields["period_s"], 3)
        yield TraceJob(
            job_id=job_id,
            tenant=workload.tenants[_pick(tenants, owners)][0],
            submit_s=round(workload.rhythm.time(clock_s), 3),
            gpus=gpus,
            rollout_gpus=size.rollout_gpus,
            **fields,
        )
        number += 1
        clock_s += workload.gap.quantile(gaps.random())


def _demand(model: ModelClass, random: Random) -> dict[str, Any]:
    common, own = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)
    mixed = SHARED * common + math.sqrt(1.0 - SHARED**2) * own
    return model.demand(rollout=_factor(mixed), work=_factor(common))


def _factor(normal: float) -> float:
    """A lognormal factor of mean 1."""
    return math.exp(SPREAD * normal - SPREAD**2 / 2.0)


def _ends(weights: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(weights))


def _pick(ends: tuple[float, ...], random: Random) -> int:
    return min(bisect_right(ends, random.random() * ends[-1]), len(ends) - 1)

"""Made-up traces that follow a workload's laws: the same seed, the same bytes.

Each quantity is drawn from a generator of its own, so that changing one law leaves the other
columns as they were.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, islice
from random import Random
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.traces.generate.distributions import STANDARD, Law
from plexrl.traces.generate.published import MODEL_CLASSES, ModelClass, class_of_size, cycles_in
from plexrl.traces.generate.workload import CAP_S, Workload
from plexrl.traces.schema import ResponseLength, TraceJob

SPREAD = 0.15
"""Of the logarithm of a job's cycles round the published ones: no two tasks are alike."""

SHARED = 0.5
"""Correlation of a job's rollout and training work: long responses make both long."""

GROUP_CORRELATION = 0.5
"""Of the lengths of responses to one prompt, between their normal scores. No public trace has
groups, so this is an assumption; give your own."""


def generate_jobs(
    workload: Workload,
    *,
    seed: int,
    jobs: int | None = None,
    span_s: float | None = None,
    cap_s: float = CAP_S,
    profiles: bool = True,
    prefix: str = "job",
) -> Iterator[TraceJob]:
    """Jobs of a workload, in order: so many, or those that arrive within a span; with `profiles`
    each has a published RL profile, of its class or for its size.

    Raises:
        InvalidRequestError: a span is all that bounds a workload whose jobs all come at once.
    """
    if jobs is None and workload.gap.quantile(1.0) <= 0:
        raise InvalidRequestError("these jobs all come at once: say how many are wanted")
    endless = _endless(workload, seed, cap_s, profiles, prefix)
    for job in islice(endless, jobs):
        if span_s is not None and job.submit_s > span_s:
            return
        yield job


def with_profiles(jobs: Iterable[TraceJob], *, seed: int) -> Iterator[TraceJob]:
    """Jobs of a public trace as RL jobs: arrivals, GPUs and durations are theirs, the cycles those
    of the published profile for their size. A job has whole cycles, one at least, and is as long as
    they are. What has segments already is left alone."""
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
    law: Law,
    *,
    seed: int,
    prompts: int,
    samples_per_prompt: int = 8,
    correlation: float = GROUP_CORRELATION,
) -> Iterator[ResponseLength]:
    """Responses, a group to each prompt, whose lengths follow `law` over all prompts.

    Lengths of a group go together by a Gaussian copula: the normal scores of any two of them have
    this correlation, whatever the law.
    """
    random = Random(f"{seed}:lengths")
    shared, own = math.sqrt(correlation), math.sqrt(1.0 - correlation)
    for prompt in range(prompts):
        common = random.gauss(0.0, 1.0)
        for _ in range(samples_per_prompt):
            score = shared * common + own * random.gauss(0.0, 1.0)
            length = law.quantile(STANDARD.cdf(score))
            yield ResponseLength(group=f"prompt-{prompt:06d}", output_tokens=max(1, round(length)))


def _endless(
    workload: Workload, seed: int, cap_s: float, profiles: bool, prefix: str
) -> Iterator[TraceJob]:
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
        job_id = f"{prefix}-{number:06d}"
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
    """Lognormal, of mean 1."""
    return math.exp(SPREAD * normal - SPREAD**2 / 2.0)


def _ends(weights: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(weights))


def _pick(ends: tuple[float, ...], random: Random) -> int:
    return min(bisect_right(ends, random.random() * ends[-1]), len(ends) - 1)

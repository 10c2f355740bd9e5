"""Made-up traces have the statistics of what they follow, within the bounds stated here.

Seeds are fixed, so nothing here is left to chance.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.traces import (
    MODEL_CLASSES,
    ResponseLength,
    Shape,
    TraceJob,
    bundled,
    fit_lengths,
    fit_workload,
    generate_jobs,
    generate_lengths,
    published_workload,
    read_jobs,
    shaped,
    with_profiles,
    write_jobs,
    write_lengths,
)
from plexrl.traces.formats import read_histogram
from plexrl.traces.generate.daily_rate import HOUR_S, Rhythm, rhythm_of
from plexrl.traces.generate.distributions import (
    Distribution,
    Exponential,
    Histogram,
    Lognormal,
    Quantiles,
    Weibull,
)
from plexrl.traces.generate.fitting import distance, fit, kolmogorov_distance
from tests.examples import examples

R1 = read_histogram(bundled("r1-lengths"))


@pytest.fixture(scope="module")
def philly() -> list[TraceJob]:
    return list(read_jobs(bundled("philly"), skip_bad=True))


def test_the_same_seed_is_the_same_bytes(tmp_path: Path) -> None:
    def written(name: str, seed: int) -> bytes:
        path = tmp_path / name
        write_jobs(path, generate_jobs(published_workload(), seed=seed, jobs=200))
        write_lengths(tmp_path / "l.csv", generate_lengths(R1, seed=seed, prompts=50))
        return path.read_bytes() + (tmp_path / "l.csv").read_bytes()

    for suffix in (".csv", ".csv.gz", ".parquet"):
        assert written(f"one{suffix}", 7) == written(f"two{suffix}", 7)
    assert written("one.csv", 7) != written("three.csv", 8)


def test_a_longer_trace_begins_as_a_shorter_one() -> None:
    short = list(generate_jobs(published_workload(), seed=1, jobs=50))
    assert list(generate_jobs(published_workload(), seed=1, jobs=80))[:50] == short
    span_s = short[30].submit_s
    within = list(generate_jobs(published_workload(), seed=1, span_s=span_s))
    assert within == [job for job in short if job.submit_s <= span_s]


def test_the_published_profile_is_met_class_by_class() -> None:
    """Means of each class within 2 %, classes in equal parts within 5 %, arrivals within 5 %."""
    jobs = list(generate_jobs(published_workload(jobs_per_day=24.0), seed=1, jobs=6000))
    assert jobs[-1].submit_s / 86_400 == pytest.approx(6000 / 24.0, rel=0.05)
    for name, model in MODEL_CLASSES.items():
        own = [job for job in jobs if job.model == name]
        assert len(own) == pytest.approx(2000, rel=0.05)
        assert {(job.gpus, job.rollout_gpus) for job in own} == {(model.gpus, model.rollout_gpus)}
        periods = [job.period_s for job in own if job.period_s is not None]
        assert np.mean(periods) == pytest.approx(model.period_s, rel=0.02)
        means = [np.mean([job.segments[at].duration_s for job in own]) for at in range(3)]
        wanted = [model.log_prob_s, model.update_s, model.sync_s]
        assert means == pytest.approx(wanted, rel=0.02)
        duty = np.mean([sum(each.duration_s for each in job.segments) for job in own])
        assert duty / np.mean(periods) == pytest.approx(model.busy_s / model.period_s, abs=0.01)
    assert all(job.cycles and job.cycles * (job.period_s or 0) > 0 for job in jobs)


def test_a_generated_philly_is_like_philly(philly: list[TraceJob]) -> None:
    """Kolmogorov distances: gaps 0.08, durations 0.02, GPUs 0.01; mean gap, mean GPU-hours within
    three standard errors, which are wide, for both have heavy tails."""
    assert len(philly) == 74_167, "it is bundled whole"
    workload = fit_workload(philly)
    assert all(found.distance <= 0.02 for found in workload.fits.values())
    made = list(generate_jobs(workload, seed=1, jobs=20_000, cap_s=1e9, profiles=False))
    gaps = np.diff([job.submit_s for job in philly]), np.diff([job.submit_s for job in made])
    assert distance(*gaps) <= 0.08
    assert abs(gaps[1].mean() - gaps[0].mean()) <= 3 * gaps[0].std() / len(made) ** 0.5
    durations = [[job.service_s for job in jobs] for jobs in (philly, made)]
    assert distance(*durations) <= 0.02
    assert distance([job.gpus for job in philly], [job.gpus for job in made]) <= 0.01
    hours = [np.array([job.gpu_seconds for job in jobs]) for jobs in (philly, made)]
    assert abs(hours[1].mean() - hours[0].mean()) <= 3 * hours[0].std() / len(made) ** 0.5
    owners = [Counter(job.tenant for job in jobs) for jobs in (philly, made)]
    for tenant, count in owners[0].most_common(5):
        assert owners[1][tenant] / len(made) == pytest.approx(count / len(philly), abs=0.01)


def test_lengths_follow_the_histogram_and_go_together_in_groups() -> None:
    """Kolmogorov distance 0.01 over all prompts; the correlation of scores within 0.03."""
    rows = list(generate_lengths(R1, seed=3, prompts=8000, samples_per_prompt=4, correlation=0.6))
    lengths = np.array([row.output_tokens for row in rows], dtype=float)
    assert kolmogorov_distance(R1, np.sort(lengths)) <= 0.01
    assert len({row.group for row in rows}) == 8000
    ranks = (np.argsort(np.argsort(lengths)) + 0.5) / len(lengths)
    scores = np.array([NormalDist().inv_cdf(float(rank)) for rank in ranks]).reshape(-1, 4)
    assert np.corrcoef(scores[:, 0], scores[:, 1])[0, 1] == pytest.approx(0.6, abs=0.03)
    model = fit_lengths(rows)
    assert model.correlation == pytest.approx(0.6, abs=0.03)
    assert model.fit.distance <= 0.02


def test_a_correlation_is_told_only_of_groups() -> None:
    lone = [ResponseLength(output_tokens=at + 1) for at in range(50)]
    assert fit_lengths(lone).correlation is None
    single = [replace(row, group=str(at)) for at, row in enumerate(lone)]
    assert fit_lengths(single).correlation is None
    pairs = [replace(row, group=str(at // 2)) for at, row in enumerate(lone)]
    correlation = fit_lengths(pairs).correlation
    assert correlation is not None
    assert correlation > 0.95
    with pytest.raises(InvalidRequestError, match="at least one length"):
        fit_lengths([])


def test_jobs_that_all_come_at_once_need_a_number() -> None:
    backlog = [TraceJob(job_id=str(at), submit_s=0.0, gpus=1, duration_s=60.0) for at in range(9)]
    workload = fit_workload(backlog)
    assert len(list(generate_jobs(workload, seed=1, jobs=4))) == 4
    with pytest.raises(InvalidRequestError, match="all arrive at once"):
        list(generate_jobs(workload, seed=1, span_s=60.0))


@pytest.mark.parametrize(
    ("law", "name"),
    [
        (Exponential(mean=40.0), "exponential"),
        (Lognormal(mu=3.0, sigma=1.5), "lognormal"),
        (Weibull(scale=100.0, shape=0.6), "weibull"),
    ],
)
def test_a_distribution_is_recovered_from_its_samples(law: Distribution, name: str) -> None:
    random = Random(5)
    found = fit([law.quantile(random.random()) for _ in range(20_000)])
    assert type(found.distribution) is type(law)
    assert found.distance == found.tried[name] <= 0.02
    for part in (0.1, 0.5, 0.9):
        assert found.distribution.quantile(part) == pytest.approx(law.quantile(part), rel=0.06)


def test_other_samples_are_kept_as_quantiles() -> None:
    numbers = [1.0] * 500 + [1000.0 + at for at in range(500)]
    found = fit(numbers)
    assert isinstance(found.distribution, Quantiles)
    assert min(distance for name, distance in found.tried.items() if name != "quantiles") > 0.1
    assert fit([0.0, 0.0]).distribution.quantile(0.5) == 0.0
    assert fit([5.0]).distribution.quantile(0.9) == 5.0


DISTRIBUTIONS: tuple[Distribution, ...] = (
    *(Exponential(mean=3.0), Lognormal(mu=0.0, sigma=2.0), Weibull(scale=1.0, shape=0.5), R1),
    Quantiles(parts=(0.0, 0.5, 1.0), values=(0.0, 1.0, 50.0)),
    Histogram(((0.0, 0.0, 1.0), (5.0, 9.0, 2.0))),
)


@settings(max_examples=examples(50))
@given(st.sampled_from(DISTRIBUTIONS), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_never_fall_and_are_finite(law: Distribution, one: float, other: float) -> None:
    low, high = law.quantile(min(one, other)), law.quantile(max(one, other))
    assert 0 <= low <= high < float("inf")


@settings(max_examples=examples(50))
@given(st.lists(st.floats(0.02, 20), min_size=1, max_size=24), st.floats(0, 1e7))
def test_the_clock_of_a_rhythm_can_be_turned_back(weights: list[float], time_s: float) -> None:
    rhythm = Rhythm(tuple(weights))
    assert rhythm.time(rhythm.clock(time_s)) == pytest.approx(time_s, rel=1e-9, abs=1e-6)


def test_a_rhythm_is_found_in_the_hours_of_arrivals() -> None:
    busy = [day * 24 * HOUR_S + hour * HOUR_S for day in range(10) for hour in (9, 9, 10, 15)]
    rhythm = rhythm_of(busy, span_s=10 * 24 * HOUR_S)
    assert len(rhythm.weights) == 24
    assert sum(rhythm.weights) / 24 == pytest.approx(1.0)
    assert rhythm.weights[9] == pytest.approx(2 * rhythm.weights[10])
    assert rhythm.weights[3] > 0
    assert rhythm_of(busy, span_s=HOUR_S).weights == (1.0,)


def test_fitting_needs_two_jobs() -> None:
    with pytest.raises(InvalidRequestError, match="at least two jobs"):
        fit_workload([TraceJob(job_id="a", submit_s=0.0, gpus=1, duration_s=1.0)])


def test_a_public_trace_gets_cycles_and_keeps_its_own_arrivals(philly: list[TraceJob]) -> None:
    some = [job for job in philly if job.gpus >= 8][:300]
    made = list(with_profiles(some, seed=2))
    assert made == list(with_profiles(some, seed=2))
    for job, found in zip(some, made, strict=True):
        assert (found.submit_s, found.gpus, found.tenant) == (job.submit_s, job.gpus, job.tenant)
        assert found.model == ("7B" if job.gpus == 8 else "30B" if job.gpus <= 16 else "235B")
        assert found.cycles is not None
        assert found.period_s is not None
        assert abs(found.service_s - max(job.service_s, found.period_s)) <= found.period_s
    assert list(with_profiles(made, seed=9)) == made


def test_a_trace_is_shaped_in_order(philly: list[TraceJob]) -> None:
    shape = Shape(compress=6.0, cap_s=14 * 86_400.0, gpus_min=8, duration_s_min=300.0)
    found = list(shaped(philly, shape))
    wanted = [job for job in philly if job.gpus >= 8 and job.service_s >= 300]
    assert [job.submit_s for job in found] == [job.submit_s / 6 for job in wanted]
    assert max(job.service_s for job in found) == 14 * 86_400
    assert list(shaped(philly[:5], Shape())) == philly[:5]
    assert {job.submit_s for job in shaped(philly[:5], Shape(backlog=True))} == {0.0}
    long = replace(philly[0], cycles=1000, duration_s=2000.0, period_s=2.0)
    window = list(shaped(philly, Shape(start_s=30 * 86_400.0, gpus_min=8)))
    large = [job for job in philly if job.gpus >= 8]
    late = [job for job in large if job.submit_s >= large[0].submit_s + 30 * 86_400.0]
    assert [job.job_id for job in window] == [job.job_id for job in late]
    assert window[0].submit_s == 0.0
    [cut] = shaped([long], Shape(cap_s=500.0))
    assert (cut.cycles, cut.duration_s) == (250, 500.0)
    with pytest.raises(InvalidRequestError, match="compress"):
        Shape(compress=0.0)

"""Cycles follow the profile, the jitter and the response lengths."""

import math
import statistics
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.sim.workload.counter_rng import exponential, normals, stream, uniform
from plexrl.sim.workload.cycles import TOKENS, CycleDistribution, sigma_of
from plexrl.sim.workload.response_lengths import longest_of, read_longest_of
from plexrl.sim.workload.scenario import Behaviour, ToolStalls
from plexrl.traces import MODEL_CLASSES, ResponseLength, TraceJob, TraceSegment, write_lengths
from plexrl.traces.bundled import bundled
from plexrl.traces.formats import read_histogram
from plexrl.traces.generate.distributions import Lognormal
from tests.examples import examples

DRAWS = 20_000
R1 = read_histogram(bundled("r1-lengths"))


def job_of(model: str = "7B", name: str = "job", **changes: object) -> TraceJob:
    profile = MODEL_CLASSES[model]
    fields = {"gpus": profile.gpus, "cycles": 100, **profile.demand(), **changes}
    return TraceJob(job_id=name, submit_s=0.0, **fields)


def lengths_s(source: CycleDistribution, draws: int = DRAWS) -> list[float]:
    found = (source.draw(number) for number in range(draws))
    return [each.rollout_s + each.busy_s + math.fsum(each.gaps_s) for each in found]


def test_the_chances_of_a_stream_are_uniform_normal_and_exponential() -> None:
    key = stream(1, "test")
    numbers = sorted(uniform(key, at) for at in range(DRAWS))
    assert max(abs(value - at / DRAWS) for at, value in enumerate(numbers)) < 0.012
    pairs = [normals(key, at) for at in range(DRAWS)]
    for each in zip(*pairs, strict=True):
        assert statistics.mean(each) == pytest.approx(0.0, abs=0.03)
        assert statistics.stdev(each) == pytest.approx(1.0, abs=0.02)
    assert statistics.correlation(*zip(*pairs, strict=True)) == pytest.approx(0.0, abs=0.03)
    gaps = [exponential(key, at, 7.0) for at in range(DRAWS)]
    assert statistics.mean(gaps) == pytest.approx(7.0, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(7.0, rel=0.05)


@pytest.mark.parametrize("model", MODEL_CLASSES)
def test_cycles_have_the_mean_and_the_deviation_of_their_row(model: str) -> None:
    job = job_of(model)
    assert job.period_s is not None
    found = lengths_s(CycleDistribution(job, Behaviour(), 1))
    assert statistics.mean(found) == pytest.approx(job.period_s, rel=0.005)
    assert statistics.stdev(found) == pytest.approx(job.jitter_s, rel=0.03)


def test_rollout_and_work_have_the_sigma_and_correlation_asked_for() -> None:
    source = CycleDistribution(job_of(), Behaviour(jitter=0.3, correlation=0.6), 1)
    cycles = [source.draw(number) for number in range(DRAWS)]
    rollouts = [math.log(each.rollout_s) for each in cycles]
    works = [math.log(each.tokens) for each in cycles]
    assert statistics.stdev(rollouts) == pytest.approx(0.3, rel=0.03)
    assert statistics.stdev(works) == pytest.approx(0.3, rel=0.03)
    assert statistics.correlation(rollouts, works) == pytest.approx(0.6, abs=0.02)
    profile = MODEL_CLASSES["7B"]
    for each in cycles[:100]:
        work = each.tokens / TOKENS
        log_prob_s, update_s, sync_s = each.segments_s
        assert log_prob_s == pytest.approx(work * profile.log_prob_s, rel=1e-5)
        assert update_s == pytest.approx(work * profile.update_s, rel=1e-5)
        assert sync_s == profile.sync_s


def test_without_jitter_every_cycle_is_the_profile_itself() -> None:
    job = job_of()
    for behaviour in (Behaviour(jitter=0.0), Behaviour(stalls=ToolStalls(chance=0.0, mean_s=9.0))):
        still = job if behaviour.jitter == 0.0 else job_of(jitter_s=0.0)
        for number in (0, 1, 999):
            cycle = CycleDistribution(still, behaviour, 3).draw(number)
            assert cycle.segments_s == tuple(each.duration_s for each in job.segments)
            assert cycle.gaps_s == (0.0, 0.0)
            assert cycle.rollout_s + cycle.busy_s + math.fsum(cycle.gaps_s) == pytest.approx(
                job.period_s, abs=1e-9
            )
            assert cycle.tokens == TOKENS


def test_a_cycle_follows_from_seed_job_and_number_alone() -> None:
    behaviour = Behaviour(responses=64, stalls=ToolStalls(chance=0.3, mean_s=20.0))
    source = CycleDistribution(job_of(), behaviour, 5)
    cycles = [source.draw(number) for number in range(50)]
    again = CycleDistribution(job_of(), behaviour, 5)
    assert [again.draw(number) for number in reversed(range(50))] == cycles[::-1]
    for other in (
        CycleDistribution(job_of(), behaviour, 6),
        CycleDistribution(job_of(name="b"), behaviour, 5),
    ):
        drawn = [other.draw(number).rollout_s for number in range(50)]
        assert not set(drawn) & {each.rollout_s for each in cycles}
    assert len({each.rollout_s for each in cycles}) == 50


def test_jobs_draw_independently_of_each_other() -> None:
    sources = [
        CycleDistribution(job_of(name=name), Behaviour(jitter=0.2), 1) for name in ("a", "b")
    ]
    draws = [[source.draw(number).rollout_s for number in range(DRAWS)] for source in sources]
    assert statistics.correlation(*draws) == pytest.approx(0.0, abs=0.03)


@settings(max_examples=examples(60), deadline=None)
@given(
    rollout_s=st.just(0.0) | st.floats(1e-3, 1000.0),
    work_s=st.just(0.0) | st.floats(1e-3, 1000.0),
    part=st.floats(0.001, 5.0),
    correlation=st.floats(-1.0, 1.0),
)
def test_the_solved_sigma_gives_the_wanted_deviation(
    rollout_s: float, work_s: float, part: float, correlation: float
) -> None:
    jitter_s = part * (rollout_s + work_s)
    sigma = sigma_of(jitter_s, rollout_s, work_s, correlation)
    if rollout_s + work_s == 0.0:
        assert sigma == 0.0
        return
    square = sigma * sigma
    variance = (rollout_s**2 + work_s**2) * math.expm1(square)
    variance += 2.0 * rollout_s * work_s * math.expm1(correlation * square)
    assert math.sqrt(variance) == pytest.approx(jitter_s, rel=1e-6)


@pytest.mark.parametrize("responses", [1, 2, 16, 512])
def test_the_longest_of_a_rollout_is_as_by_drawing_every_response(responses: int) -> None:
    random = Random(responses)
    draws = 4000 if responses < 100 else 400
    longest, sums = [], []
    for _ in range(draws):
        drawn = [R1.quantile(random.random()) for _ in range(responses)]
        longest.append(max(drawn))
        sums.append(math.fsum(drawn))
    model = longest_of(responses, R1)
    key = stream(1, "longest")
    made = [model.draw(uniform(key, 2 * at), normals(key, 2 * at + 1)[0]) for at in range(draws)]
    lengths = [each[0] * model.longest_mean for each in made]
    totals = [each[1] * model.mean * responses for each in made]
    for brute, quick in ((longest, lengths), (sums, totals)):
        error = statistics.stdev(brute) * math.sqrt(2.0 / draws)
        assert statistics.mean(quick) == pytest.approx(statistics.mean(brute), abs=5 * error)
    for part in (50, 90, 99):
        at = draws * part // 100
        assert sorted(lengths)[at] == pytest.approx(sorted(longest)[at], rel=0.12)
        assert sorted(totals)[at] == pytest.approx(sorted(sums)[at], rel=0.12)
    assert statistics.correlation(lengths, totals) == pytest.approx(
        statistics.correlation(longest, sums), abs=0.12
    )


def test_rollouts_by_response_lengths_have_the_profiles_mean_and_longer_tails() -> None:
    source = CycleDistribution(job_of(), Behaviour(responses=8), 1)
    cycles = [source.draw(number) for number in range(DRAWS)]
    rollouts = sorted(each.rollout_s for each in cycles)
    assert statistics.mean(rollouts) == pytest.approx(source.mean.rollout_s, rel=0.02)
    assert statistics.mean(each.tokens for each in cycles) == pytest.approx(TOKENS, rel=0.02)
    # Of a lognormal source with this median and 84th percentile.
    median, sigma = rollouts[DRAWS // 2], math.log(rollouts[int(0.8413 * DRAWS)])
    sigma -= math.log(median)
    assert rollouts[int(0.99 * DRAWS)] > median * math.exp(sigma)


def test_stalls_of_tools_come_on_top_of_the_rollout() -> None:
    stalls = ToolStalls(chance=0.2, mean_s=50.0, sigma=0.5)
    plain = CycleDistribution(job_of(), Behaviour(), 1)
    stalled = CycleDistribution(job_of(), Behaviour(stalls=stalls), 1)
    added = []
    for number in range(DRAWS):
        one, other = plain.draw(number), stalled.draw(number)
        assert one.segments_s == other.segments_s
        added.append(other.rollout_s - one.rollout_s)
    assert min(added) >= 0.0
    hit = [each for each in added if each > 0.0]
    assert len(hit) / DRAWS == pytest.approx(0.2, abs=0.01)
    assert statistics.mean(hit) == pytest.approx(50.0, rel=0.04)


def test_a_burst_is_the_sum_of_its_touching_segments() -> None:
    job = job_of(
        segments=(
            TraceSegment(function="log_prob", offset_s=100.0, duration_s=10.0),
            TraceSegment(function="update", offset_s=110.0, duration_s=30.0),
            TraceSegment(function="critic", offset_s=150.0, duration_s=20.0),
            TraceSegment(function="sync", offset_s=170.0, duration_s=5.0),
        )
    )
    each, burst = (CycleDistribution(job, Behaviour(), 1, detail=d) for d in ("operation", "burst"))
    assert burst.functions == ("log_prob+update", "critic+sync")
    for number in range(20):
        one, other = each.draw(number), burst.draw(number)
        assert other.segments_s == pytest.approx(
            (sum(one.segments_s[:2]), sum(one.segments_s[2:])), rel=1e-12
        )
        assert other.gaps_s == (10.0,)
        assert (one.rollout_s, one.tokens) == (other.rollout_s, other.tokens)


def test_a_job_without_segments_needs_its_gpus_all_the_time() -> None:
    source = CycleDistribution(
        TraceJob(job_id="a", submit_s=0.0, gpus=1, duration_s=500.0), Behaviour(), 1
    )
    cycle = source.draw(0)
    assert (cycle.rollout_s, cycle.segments_s, cycle.gaps_s) == (0.0, (500.0,), ())


def test_lengths_of_a_trace_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    write_lengths(path, (ResponseLength(output_tokens=100) for _ in range(50)))
    source = CycleDistribution(job_of(), Behaviour(responses=32, lengths=str(path)), 1)
    assert source.draw(0).rollout_s == pytest.approx(source.mean.rollout_s)
    assert source.draw(1).tokens == TOKENS


def test_a_law_without_bounds_has_a_finite_longest() -> None:
    model = longest_of(1000, Lognormal(mu=5.0, sigma=1.0))
    drawn = [model.draw(uniform(1, at), 0.0)[0] for at in range(5000)]
    assert statistics.mean(drawn) == pytest.approx(1.0, rel=0.02)


def test_what_cannot_be_drawn_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="chance of 0 to 1"):
        ToolStalls(chance=1.5, mean_s=1.0)
    with pytest.raises(InvalidRequestError, match="correlation"):
        Behaviour(correlation=2.0)
    with pytest.raises(InvalidRequestError, match="at least 0"):
        Behaviour(jitter=-0.1)
    with pytest.raises(InvalidRequestError):
        read_longest_of(4, str(tmp_path / "nothing.csv"))
    with pytest.raises(InvalidRequestError, match="not response lengths"):
        read_longest_of(4, "bundled:philly")

"""The cost model finds the coefficients behind measured decode steps."""

from dataclasses import replace
from random import Random

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.rollout.coordinator.cost_fit import CostFit
from plexrl.rollout.coordinator.messages import StepMeasured
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20, CostModel

PRIOR = CostModel(k1=1e-6, k2=1e-2, k3=1e-4, k4=1e-3, k5=2.0)


def measured(model: CostModel, random: Random, n_max: int, noise: float) -> list[StepMeasured]:
    steps = []
    for _ in range(400):
        running = random.randint(1, n_max)
        kv = running * random.uniform(500, 20_000)
        seconds = model.step_s(kv, running) * random.uniform(1 - noise, 1 + noise)
        steps.append(StepMeasured(kv_cache=kv, running=running, seconds=seconds))
    return steps


def errors(found: CostModel, steps: list[StepMeasured]) -> list[float]:
    return [abs(found.step_s(s.kv_cache, s.running) / s.seconds - 1) for s in steps]


def test_the_coefficients_of_exact_steps_are_found() -> None:
    true = QWEN3_30B_A3B_ON_H20
    fit = CostFit(PRIOR, steps_max=1000)
    for seed in range(3):
        fit.add(measured(true, Random(seed), n_max=200, noise=0))
    found = fit.model
    assert found.k1 == pytest.approx(true.k1, rel=0.02)
    assert found.k3 == pytest.approx(true.k3, rel=0.05)
    # `max(k2, k3 n) + k4` tells the sum of k2 and k4 for few trajectories, not the parts.
    assert found.k2 + found.k4 == pytest.approx(true.k2 + true.k4, rel=0.02)
    assert found.k5 == PRIOR.k5
    assert max(errors(found, measured(true, Random(9), n_max=200, noise=0))) < 0.01


@pytest.mark.parametrize("seed", range(10))
def test_noisy_steps_of_any_model_are_predicted(seed: int) -> None:
    random = Random(seed)
    true = CostModel(
        k1=10 ** random.uniform(-8, -6),
        k2=10 ** random.uniform(-3, -1.5),
        k3=10 ** random.uniform(-5, -3),
        k4=10 ** random.uniform(-3, -2),
        k5=1.0,
    )
    fit = CostFit(PRIOR, steps_max=1000)
    fit.add(measured(true, random, n_max=100, noise=0.1))
    found = errors(fit.model, measured(true, random, n_max=100, noise=0))
    assert sum(found) / len(found) < 0.05


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_few_steps_of_another_time_scale_change_little(factor: float) -> None:
    """Such as those during which the machine did something else."""
    true = QWEN3_30B_A3B_ON_H20
    for seed in range(10):
        random = Random(seed)
        steps = [
            replace(each, seconds=each.seconds * (factor if random.random() < 0.1 else 1.0))
            for each in measured(true, random, n_max=100, noise=0.1)
        ]
        fit = CostFit(PRIOR, steps_max=512)
        fit.add(steps)
        found = errors(fit.model, measured(true, random, n_max=100, noise=0))
        assert sum(found) / len(found) < 0.06


def test_the_prior_holds_until_there_are_enough_steps() -> None:
    fit = CostFit(PRIOR, steps_max=512)
    step = StepMeasured(kv_cache=1e5, running=10, seconds=0.5)
    assert fit.add([step] * 7) == PRIOR
    assert fit.add([step]).step_s(1e5, 10) == pytest.approx(0.5, rel=0.01)


def test_steps_at_one_load_scale_the_prior() -> None:
    """They do not tell what a step is made of, however they scatter."""
    true = QWEN3_30B_A3B_ON_H20
    prior = replace(true, k1=3 * true.k1, k2=3 * true.k2, k3=3 * true.k3, k4=3 * true.k4)
    for seed in range(10):
        random = Random(seed)
        fit = CostFit(prior, steps_max=512)
        for _ in range(40):
            seconds = true.step_s(1e5, 10) * random.uniform(0.95, 1.05)
            fit.add([StepMeasured(kv_cache=1e5, running=10, seconds=seconds)])
        for kv_cache, running in ((1e5, 10), (2e4, 2), (1e6, 100)):
            expected = true.step_s(kv_cache, running)
            assert fit.model.step_s(kv_cache, running) == pytest.approx(expected, rel=0.05)


def test_steps_of_two_loads_tell_the_times_at_both() -> None:
    true = QWEN3_30B_A3B_ON_H20
    fit = CostFit(PRIOR, steps_max=512)
    for kv_cache, running in ((1e5, 10), (1e6, 100)):
        step = StepMeasured(
            kv_cache=kv_cache, running=running, seconds=true.step_s(kv_cache, running)
        )
        fit.add([step] * 20)
    assert fit.model.step_s(1e5, 10) == pytest.approx(true.step_s(1e5, 10), rel=0.02)
    assert fit.model.step_s(1e6, 100) == pytest.approx(true.step_s(1e6, 100), rel=0.02)


def test_steps_of_any_times_give_a_model() -> None:
    """Also times that only the KV cache explains, or that shrink as the load grows."""
    random = Random(1)
    for number in range(200):
        fit, steps = CostFit(PRIOR, steps_max=16), []
        for _ in range(16):
            kv_cache = 10 ** random.uniform(0, 7) * random.choice((0.0, 1.0, 1.0))
            running = random.randint(1, 300)
            seconds = (kv_cache + 1e-9, 1 / running, 10 ** random.uniform(-9, 5))[number % 3]
            steps.append(StepMeasured(kv_cache=kv_cache, running=running, seconds=seconds))
        assert fit.add(steps).step_s(0.0, 1) > 0


def test_a_fit_goes_on_from_its_state() -> None:
    steps = measured(QWEN3_30B_A3B_ON_H20, Random(1), n_max=50, noise=0.1)
    fit = CostFit(PRIOR, steps_max=100)
    fit.add(steps[:150])
    other = CostFit(PRIOR, steps_max=100)
    other.restore(fit.state())
    assert len(fit.state()) == 100
    assert other.model == fit.model
    assert other.add(steps[150:170]) == fit.add(steps[150:170])


def test_equal_steps_fit_and_leave_other_loads_plausible() -> None:
    fit = CostFit(QWEN3_30B_A3B_ON_H20, steps_max=100)
    found = fit.add([StepMeasured(kv_cache=1e5, running=10, seconds=0.05)] * 50)
    assert found.step_s(1e5, 10) == pytest.approx(0.05, rel=0.01)
    assert min(found.k1, found.k2, found.k3, found.k4) >= 0
    assert found.step_s(1e6, 100) > found.step_s(1e5, 10)


def test_only_the_latest_steps_count() -> None:
    fit = CostFit(PRIOR, steps_max=400)
    fit.add(measured(PRIOR, Random(1), n_max=50, noise=0))
    fit.add(measured(QWEN3_30B_A3B_ON_H20, Random(2), n_max=50, noise=0))
    assert max(errors(fit.model, measured(QWEN3_30B_A3B_ON_H20, Random(3), 50, noise=0))) < 0.01


@pytest.mark.parametrize(
    ("kv_cache", "running", "seconds"),
    [(1.0, 0, 1.0), (1.0, 1, 0.0), (-1.0, 1, 1.0), (1.0, 1, float("nan"))],
)
def test_impossible_steps_are_refused(kv_cache: float, running: int, seconds: float) -> None:
    fit = CostFit(PRIOR, steps_max=16)
    with pytest.raises(InvalidRequestError, match="measured step"):
        fit.add([StepMeasured(kv_cache=kv_cache, running=running, seconds=seconds)])
    assert fit.model == PRIOR


@pytest.mark.parametrize("field", ["k1", "k5"])
def test_negative_coefficients_are_refused(field: str) -> None:
    coefficients = {"k1": 1.0, "k2": 1.0, "k3": 1.0, "k4": 1.0, "k5": 1.0} | {field: -1.0}
    with pytest.raises(InvalidRequestError, match=field):
        CostModel(**coefficients)

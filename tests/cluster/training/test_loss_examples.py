"""The one-page examples of losses: rewards rise, and losses fall."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import plexrl

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


POLICY_LOSSES, PREFERENCES = load("policy_losses"), load("preferences")
PPO = load("ppo_digits")


@pytest.mark.parametrize(
    ("recipe", "seed"),
    [
        pytest.param(recipe, seed, marks=() if (recipe, seed) == ("ppo", 1) else pytest.mark.slow)
        for recipe in POLICY_LOSSES.RECIPES
        for seed in (1, 2, 3)
    ],
)
def test_the_reward_rises_with_each_loss(job: plexrl.Job, recipe: str, seed: int) -> None:
    history = POLICY_LOSSES.train(job, recipe, seed=seed)
    assert history[0] < 0.3
    assert sum(history[-3:]) / 3 > 0.6
    assert [row["values"]["reward"] for row in job.metrics()] == history


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_the_reward_rises_with_a_critic(job: plexrl.Job, seed: int) -> None:
    history = PPO.train(job, seed=seed)
    assert history[0] < 0.3
    assert sum(history[-3:]) / 3 > 0.6
    errors = [row["values"]["critic/squared_error"] for row in job.metrics()]
    assert max(errors[-3:]) < 0.01 < max(errors)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_supervised_and_preference_losses_fall(job: plexrl.Job, seed: int) -> None:
    supervised, preferences = PREFERENCES.train(job, seed=seed)
    assert supervised[-1] < 0.7 * supervised[0]
    assert preferences[0] == pytest.approx(0.6931, abs=1e-3)
    assert preferences[-1] < 0.5

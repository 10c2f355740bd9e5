"""Trajectories of several turns on a live cluster."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import plexrl
from plexrl.environments import (
    Environment,
    PlainText,
    Step,
    Trajectory,
    VerifiersTasks,
    roll_out,
)
from plexrl.errors import DeadlineExceededError, InvalidRequestError

VOCABULARY = "abcdefgh:"
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
TOKENIZER = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
QUESTION, OUTPUT = "abcdefgh" * 4, ":cafe:"


class Echo:
    """Answers each reply with the same output, after `stall_s` seconds; over after `turns`."""

    stops: Sequence[str] = ("h",)

    def __init__(self, index: int, *, turns: int = 3, stall_s: float = 0.0) -> None:
        self.index, self._turns, self._stall_s = index, turns, stall_s
        self.replies: list[str] = []

    def reset(self) -> str:
        return QUESTION + "abcdefgh"[self.index % 8]

    def step(self, reply: str) -> Step:
        time.sleep(self._stall_s)
        self.replies.append(reply)
        return Step(observation=OUTPUT, reward=0.5, done=len(self.replies) == self._turns)


class Foreign(Echo):
    """Answers with text that has no tokens."""

    def step(self, reply: str) -> Step:
        return Step(observation=reply.upper() + "Z")


class Broken(Echo):
    """Fails at its first step."""

    def step(self, reply: str) -> Step:
        raise RuntimeError(f"no answer to {reply}")


@pytest.fixture
def rollout(job: plexrl.Job) -> plexrl.RolloutDeployment:
    return job.rollout_deployment("actor", MODEL, max_sequence_tokens=256)


def play(
    rollout: plexrl.RolloutDeployment, environments: Sequence[Environment], **options: Any
) -> list[Trajectory]:
    settings: dict[str, Any] = {"turns_max": 3, **options}
    return roll_out(
        rollout,
        environments,
        PlainText(TOKENIZER),
        sampling=plexrl.SamplingParams(max_tokens=12, seed=9, ignore_eos=True),
        **settings,
    )


def test_a_trajectory_holds_what_was_drawn_and_masks_what_was_read(
    rollout: plexrl.RolloutDeployment,
) -> None:
    environments = [Echo(index) for index in range(4)]
    for trajectory, environment in zip(play(rollout, environments), environments, strict=True):
        assert (trajectory.turns, trajectory.ended, trajectory.reward) == (3, "done", 1.5)
        read = OUTPUT.join(environment.replies)
        assert TOKENIZER.decode(trajectory.tokens, skip_special_tokens=True) == (
            environment.reset() + read
        )
        drawn = [t for t, mask in zip(trajectory.tokens, trajectory.mask, strict=True) if mask]
        assert TOKENIZER.decode(drawn) == "".join(environment.replies)
        silent = [p for p, m in zip(trajectory.logprobs, trajectory.mask, strict=True) if not m]
        assert not any(silent)


def test_logprobs_are_those_of_the_whole_sequence(
    job: plexrl.Job, rollout: plexrl.RolloutDeployment
) -> None:
    played = play(rollout, [Echo(0), Echo(1)])
    batch = plexrl.Batch.from_segments([each.segment() for each in played])
    reference = job.reference_deployment("reference", MODEL)
    for whole, each in zip(reference.forward(batch).result().logprobs, played, strict=True):
        mask = np.array(each.mask)
        assert np.allclose(whole * mask, each.logprobs, atol=1e-4)


def test_a_reply_ends_at_the_call(rollout: plexrl.RolloutDeployment) -> None:
    environments = [Echo(index) for index in range(8)]
    play(rollout, environments)
    replies = [reply for each in environments for reply in each.replies]
    assert any(reply.endswith("h") for reply in replies), "no reply calls"
    assert not any("h" in reply[:-1] for reply in replies)


def test_trajectories_do_not_depend_on_how_long_tools_take(
    rollout: plexrl.RolloutDeployment,
) -> None:
    at_once = play(rollout, [Echo(index) for index in range(6)])
    stalled = play(
        rollout,
        [Echo(index, stall_s=0.05 * (index % 3)) for index in range(6)],
        operations_at_once=1,
        steps_at_once=2,
    )
    in_step = play(
        rollout, [Echo(index, stall_s=0.05 * (index % 3)) for index in range(6)], in_step=True
    )
    assert [each.tokens for each in stalled] == [each.tokens for each in at_once]
    assert [each.tokens for each in in_step] == [each.tokens for each in at_once]
    assert len({call for each in in_step for call in each.operations}) == 3, "one call each turn"
    assert len({tuple(each.tokens) for each in at_once}) == 6


def test_a_turn_reuses_the_keys_and_values_of_the_turns_before(
    rollout: plexrl.RolloutDeployment,
) -> None:
    play(rollout, [Echo(0, stall_s=0.2)])
    (engine,) = rollout.status()["engines"]
    # Whole blocks of 16 tokens: two of the question in each of the later turns, at least.
    assert engine["prefix_tokens_reused"] >= 2 * 32


def test_an_error_of_an_environment_ends_its_trajectory_alone(
    rollout: plexrl.RolloutDeployment,
) -> None:
    broken, whole = play(rollout, [Broken(0), Echo(1)])
    assert (broken.ended, broken.turns) == ("error", 1)
    assert "no answer to" in str(broken.error)
    assert whole.ended == "done"


def test_an_environment_that_hangs_ends_its_trajectory_alone(
    rollout: plexrl.RolloutDeployment,
) -> None:
    hanging, whole = play(rollout, [Echo(0, stall_s=60.0), Echo(1)], step_timeout_s=0.5)
    assert isinstance(hanging.error, DeadlineExceededError)
    assert whole.ended == "done"


def test_a_trajectory_ends_at_its_bounds(rollout: plexrl.RolloutDeployment) -> None:
    (by_turns,) = play(rollout, [Echo(0, turns=9)], turns_max=2)
    assert (by_turns.ended, by_turns.turns) == ("turns", 2)
    (by_length,) = play(rollout, [Echo(0, turns=9)], turns_max=9, max_sequence_tokens=64)
    assert by_length.ended == "length"
    assert by_length.mask[-1] == 1, "what nobody answers to is left out"


def test_text_outside_the_vocabulary_ends_the_trajectory(
    rollout: plexrl.RolloutDeployment,
) -> None:
    (played,) = play(rollout, [Foreign(0)])
    assert played.ended == "error"
    assert "not in the vocabulary" in str(played.error)


def test_a_seed_is_needed(rollout: plexrl.RolloutDeployment) -> None:
    with pytest.raises(InvalidRequestError, match="seed is missing"):
        roll_out(rollout, [], PlainText(TOKENIZER), sampling=plexrl.SamplingParams())


def test_rubrics_of_verifiers_score_what_a_live_model_draws(
    rollout: plexrl.RolloutDeployment,
) -> None:
    pytest.importorskip("verifiers.clients", reason="pip install 'plexrl[verifiers]'")
    verifiers = pytest.importorskip("verifiers")
    datasets = pytest.importorskip("datasets")

    class Echoing(verifiers.MultiTurnEnv):  # type: ignore[misc,name-defined]  # it has no types here
        async def env_response(self, *_: Any, **__: Any) -> Any:
            return [{"role": "user", "content": OUTPUT}]

    def letters(completion: Any) -> float:
        replies = [each["content"] for each in completion if each["role"] == "assistant"]
        return float(len("".join(replies)))

    questions = [{"question": "abcdefgh" * 4 + letter} for letter in "ab"]
    source = Echoing(
        max_turns=2,
        dataset=datasets.Dataset.from_list(questions),
        rubric=verifiers.Rubric(funcs=[letters]),
    )
    with VerifiersTasks(source) as tasks:
        played = play(rollout, tasks.environments(samples=2))
    assert [(each.ended, each.turns) for each in played] == [("done", 2)] * 4
    for trajectory in played:
        drawn = [t for t, mask in zip(trajectory.tokens, trajectory.mask, strict=True) if mask]
        assert trajectory.reward == len(TOKENIZER.decode(drawn, skip_special_tokens=True))
        assert OUTPUT in TOKENIZER.decode(trajectory.tokens, skip_special_tokens=True)

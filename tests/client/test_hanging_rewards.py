"""A plain reward function that never returns ends the loop of its rollout."""

import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plexrl.client.blocking.bounded_rollout import BoundedRollout
from plexrl.client.data.results import Sample
from plexrl.errors import DeadlineExceededError

PROMPT = [3, 4, 5]
TIMEOUT_S = 0.2


class OneSample(BoundedRollout):
    """A rollout whose cluster has generated one sample of `PROMPT` and waits for its reward."""

    def __init__(self) -> None:
        self.name = "rollout"
        self._path = "/rollout"
        self._order = {"samples": 1, "prompts": 1, "first_batch": 0}
        self._pause = threading.Event()

    def status(self) -> Any:
        return {"next_group": 0, "next_batch": 0, "latest_batch": None}

    def _trainer_step(self) -> int:
        return 0

    def _ask(self, *_: object) -> Any:
        """The batch is not complete."""
        self._pause.wait(0.01)
        return SimpleNamespace(status_code=202)

    def _exchange(self, body: Mapping[str, Any], wait_s: float) -> tuple[Any, Any]:
        self._pause.wait(min(wait_s, 0.01))
        count = 1 if body["prompts"] and body["after"] == 0 else 0
        rows = count or body["after"]
        answer = {"dropped": 0, "cursor": rows, "next_group": rows, "groups_wanted": 1 - rows}
        answer |= {"events": [0] * count, "finish": ["stop"] * count}
        answer["segments"] = [[(1, 0, 0)]] * count
        whole, lengths = np.array([0] * count), np.array([1] * count)
        arrays = {"trajectories": whole, "groups": whole, "tokens": np.array([5] * count)}
        arrays |= {"lengths": lengths, "logprobs": np.zeros(count, np.float32)}
        arrays["prompts"] = np.array(PROMPT * count)
        arrays["prompt_lengths"] = np.array([len(PROMPT)] * count)
        return answer, arrays


@pytest.fixture
def hangs() -> Iterator[Callable[[list[int], Sample], float]]:
    """A reward function that returns when the test ends."""
    is_over = threading.Event()

    def reward(_: list[int], __: Sample) -> float:
        is_over.wait()
        return 1.0

    yield reward
    is_over.set()


@pytest.mark.parametrize("loop", ["batches", "parts"])
def test_a_reward_function_that_hangs_ends_the_loop_and_names_the_prompt(
    loop: str, hangs: Callable[[list[int], Sample], float]
) -> None:
    more = {"tokens_min": 1} if loop == "parts" else {}
    found = getattr(OneSample(), loop)([PROMPT], hangs, steps=1, reward_timeout_s=TIMEOUT_S, **more)
    with pytest.raises(DeadlineExceededError, match=r"not answered in 0\.2 s about the prompt.*3"):
        next(found)

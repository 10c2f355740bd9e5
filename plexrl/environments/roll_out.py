"""Plays many trajectories of several turns at the same time.

While a trajectory's tool runs, nothing of it is queued. The engine keeps the keys and values of its
turns in its prefix cache as long as there is space and the rollout keeps its GPUs, and computes
them again otherwise. If all trajectories are in their tools, a rollout that shares its GPUs is idle
and others get them.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from plexrl.client.data.results import Sample
from plexrl.environments.environment import Environment, Step
from plexrl.environments.texts import TurnText
from plexrl.environments.trajectory import Trajectory
from plexrl.errors import (
    BatchShapeError,
    DeadlineExceededError,
    ExecutionError,
    InvalidRequestError,
    OperationCancelledError,
    PlexRLError,
)
from plexrl.limits import check_numbers

if TYPE_CHECKING:
    from plexrl.client.blocking.deployment_kinds import RolloutDeployment
    from plexrl.client.futures.generations import GenerateFuture
    from plexrl.wire.operations import SamplingParams


def roll_out(
    rollout: "RolloutDeployment",
    environments: Sequence[Environment],
    text: TurnText,
    *,
    sampling: "SamplingParams",
    turns_max: int = 8,
    max_sequence_tokens: int | None = None,
    steps_at_once: int = 64,
    step_timeout_s: float = 300.0,
    operations_at_once: int = 4,
    in_step: bool = False,
) -> list[Trajectory]:
    """Play one trajectory against each of `environments`, and return them in this order.

    `text` turns observations into tokens and replies into text. `sampling` is that of each turn; it
    needs a `seed`, and its `stop_strings` are added to the environments' own. A trajectory ends
    after `turns_max` turns, or when a further turn would begin with `max_sequence_tokens` tokens or
    more (absent: not checked; a prompt that is too long for the deployment is then an error).

    `steps_at_once` environments at most are asked at the same time, each in a thread. One that
    answers with an error, or not within `step_timeout_s` seconds, ends its trajectory, and the
    others go on.

    Trajectories that are ready together go on in one `generate`, of which `operations_at_once` run
    at the same time. With `in_step` all take their turns together: a turn begins when all tools
    have answered, so that the rollout is idle for longer at a time, and others can use its GPUs.
    What is drawn depends on the seed, `first_sample`, the weights, and the observations, not on how
    long environments take. Turns have the numbers from `first_sample` on, of which this call takes
    `len(environments) * turns_max`. If it raises, the generations that still run are cancelled.

    Raises:
        InvalidRequestError: there is no seed, or a number is out of range.
        PlexRLError: a generation has failed.
    """
    if sampling.seed is None:
        raise InvalidRequestError(
            "sampling.seed is missing: give one, so that a trajectory does not depend on how long "
            "its tools take",
            parameter="seed",
        )
    stops = {stop for environment in environments for stop in environment.stops}
    settings = _Settings(
        sampling=replace(sampling, stop_strings=tuple(sorted(stops.union(sampling.stop_strings)))),
        turns_max=turns_max,
        max_sequence_tokens=max_sequence_tokens,
        steps_at_once=steps_at_once,
        step_timeout_s=step_timeout_s,
        operations_at_once=operations_at_once,
        in_step=in_step,
    )
    play = _Play(rollout, environments, text, settings)
    play.run()
    return play.trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Arguments of `roll_out`."""

    sampling: "SamplingParams"
    turns_max: int
    max_sequence_tokens: int | None
    steps_at_once: int
    step_timeout_s: float
    operations_at_once: int
    in_step: bool

    def __post_init__(self) -> None:
        check_numbers("roll_out", {each.name: getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True)
class _Stepped:
    """An environment has answered: the first observation, or a step."""

    index: int
    turn: int
    answer: Step | Exception


@dataclass(frozen=True, slots=True)
class _Drawn:
    index: int
    sample: Sample
    operation: str


@dataclass(frozen=True, slots=True)
class _Generated:
    """A generation has ended; `error`: why it failed."""

    operation: str
    error: Exception | None = None


class _Play:
    """One call of `roll_out`. Threads only put events into the queue; `run` changes the state."""

    def __init__(
        self,
        rollout: "RolloutDeployment",
        environments: Sequence[Environment],
        text: TurnText,
        settings: _Settings,
    ) -> None:
        self._rollout, self._text, self._settings = rollout, text, settings
        self.trajectories = [Trajectory(environment=each) for each in environments]
        self._events: queue.SimpleQueue[_Stepped | _Drawn | _Generated] = queue.SimpleQueue()
        self._to_step: deque[tuple[int, str | None]] = deque()
        """Environments to ask: index, and the reply; None: they begin."""
        self._stepping: dict[int, float] = {}
        """When each asked environment was asked, oldest first."""
        self._ready: list[int] = []
        self._generating: dict[str, GenerateFuture] = {}
        """By the ids of their operations."""

    def run(self) -> None:
        try:
            self._play()
        finally:
            for future in self._generating.values():
                # In a thread: a cluster that does not answer must not hold up the error.
                threading.Thread(target=_cancel, args=(future,), daemon=True).start()

    def _play(self) -> None:
        self._to_step.extend((index, None) for index in range(len(self.trajectories)))
        while self._to_step or self._stepping or self._ready or self._generating:
            self._start_steps()
            self._start_generation()
            self._end_overdue(time.monotonic())
            if not (self._stepping or self._generating):
                continue
            try:
                self._take(self._events.get(timeout=self._patience_s()))
                while True:
                    self._take(self._events.get_nowait())
            except queue.Empty:
                continue

    def _start_steps(self) -> None:
        while self._to_step and len(self._stepping) < self._settings.steps_at_once:
            index, reply = self._to_step.popleft()
            self._stepping[index] = time.monotonic()
            turn = self.trajectories[index].turns
            # A daemon: an environment that hangs must not hold up the end of the process.
            threading.Thread(target=self._step, args=(index, turn, reply), daemon=True).start()

    def _step(self, index: int, turn: int, reply: str | None) -> None:
        environment = self.trajectories[index].environment
        answer: Step | Exception
        try:
            if reply is None:
                answer = Step(observation=environment.reset())
            else:
                answer = _checked(environment.step(reply))
        except Exception as error:
            answer = error
        except BaseException as error:
            # Such as `SystemExit`, which would end the thread without a word.
            answer = ExecutionError(f"environment {index} raised {error!r}")
            answer.__cause__ = error
        self._events.put(_Stepped(index, turn, answer))

    def _start_generation(self) -> None:
        if not self._ready or len(self._generating) >= self._settings.operations_at_once:
            return
        if self._settings.in_step and (self._to_step or self._stepping or self._generating):
            return
        indices, self._ready = sorted(self._ready), []
        prompts = [self.trajectories[index].tokens for index in indices]
        # Each turn of each trajectory has a random stream of its own.
        first, turns_max = self._settings.sampling.first_sample, self._settings.turns_max
        streams = [first + index * turns_max + self.trajectories[index].turns for index in indices]
        future = self._rollout.generate(
            prompts, sampling=self._settings.sampling, stream="rows", first_samples=streams
        )
        self._generating[future.operation] = future
        threading.Thread(target=self._read, args=(future, indices), daemon=True).start()

    def _read(self, future: "GenerateFuture", indices: list[int]) -> None:
        try:
            for prompt, _, sample in future.samples():
                self._events.put(_Drawn(indices[prompt], sample, future.operation))
        except Exception as error:
            self._events.put(_Generated(future.operation, error))
        else:
            self._events.put(_Generated(future.operation))

    def _take(self, event: _Stepped | _Drawn | _Generated) -> None:
        match event:
            case _Drawn():
                self._drawn(event)
            case _Generated(operation=operation, error=error):
                del self._generating[operation]
                if error is not None:
                    raise error
            case _Stepped(index=index, turn=turn):
                if index in self._stepping and turn == self.trajectories[index].turns:
                    self._stepped(index, event.answer)

    def _drawn(self, event: _Drawn) -> None:
        trajectory = self.trajectories[event.index]
        trajectory.drew(event.sample, event.operation)
        if event.sample.finish_reason == "abort":
            # What was cut off is no answer: its score would be that of another reply.
            why = f"operation {event.operation!r} was interrupted before the reply had ended"
            trajectory.ended, trajectory.error = "error", OperationCancelledError(why)
            return
        self._to_step.append((event.index, self._text.read(event.sample.tokens)))

    def _stepped(self, index: int, answer: Step | Exception) -> None:
        trajectory = self.trajectories[index]
        trajectory.environment_s += time.monotonic() - self._stepping.pop(index)
        if isinstance(answer, Exception):
            trajectory.ended, trajectory.error = "error", answer
            return
        trajectory.reward += answer.reward
        if answer.done:
            trajectory.ended = "done"
        elif trajectory.turns == self._settings.turns_max:
            trajectory.ended = "turns"
        else:
            self._reads(index, answer)

    def _reads(self, index: int, answer: Step) -> None:
        trajectory = self.trajectories[index]
        try:
            tokens = self._tokens_of(trajectory, answer)
        except Exception as error:
            # The observation has no tokens in this vocabulary, the template refuses it, or it is
            # neither a text nor messages.
            trajectory.ended, trajectory.error = "error", error
            return
        most = self._settings.max_sequence_tokens
        if most is not None and len(trajectory.tokens) + len(tokens) >= most:
            trajectory.ended = "length"
            return
        trajectory.reads(tokens)
        self._ready.append(index)

    def _tokens_of(self, trajectory: Trajectory, answer: Step) -> list[int]:
        if trajectory.turns:
            return self._text.follow(trajectory.reply, answer.observation)
        tokens = self._text.begin(answer.observation)
        if not tokens:
            raise BatchShapeError("the first observation has no tokens: give a prompt")
        return tokens

    def _end_overdue(self, now: float) -> None:
        late = [
            i for i, asked in self._stepping.items() if now - asked > self._settings.step_timeout_s
        ]
        for index in late:
            after = (
                f"environment {index} has not answered within {self._settings.step_timeout_s:g} s"
            )
            self._stepped(index, DeadlineExceededError(f"{after}: raise step_timeout_s"))

    def _patience_s(self) -> float | None:
        if not self._stepping:
            return None
        oldest = next(iter(self._stepping.values()))
        return max(0.001, oldest + self._settings.step_timeout_s - time.monotonic() + 0.001)


def _checked(answer: object) -> Step:
    """The answer of an environment. Raises `TypeError` or `ValueError`: it is no step."""
    if not isinstance(answer, Step):
        raise TypeError(f"`step` has returned {type(answer).__name__}: return a Step")
    return replace(answer, reward=float(answer.reward))


def _cancel(future: "GenerateFuture") -> None:
    with suppress(PlexRLError):
        future.cancel()

"""Environments of `verifiers`: its `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` and what is built on
them, with their rubrics and datasets.

The library plays the rollout itself, with all its hooks, stop conditions and scoring. It takes its
replies from a client, and this client's replies are those of `roll_out`: each request of the
library is an observation, and each step answers one.
"""

import asyncio
import json
import queue
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from plexrl.environments.environment import Message, Observation, Step
from plexrl.errors import ConflictError, ExecutionError, InvalidRequestError
from plexrl.model.text.tool_calls import CALL_END, split_calls

if TYPE_CHECKING:
    from concurrent.futures import Future

MODEL = "plexrl"
"""Name of the model that the library notes with its rollouts."""
CLOSE_S = 10.0
"""How long `close` waits for rollouts that are busy."""


class VerifiersTasks:
    """The tasks of an environment of `verifiers` (`pip install 'plexrl[verifiers]'`).

    All its rollouts share one event loop, in a thread that `close`, or the end of a `with` block,
    ends: what the library's objects wait for belongs to one loop.
    """

    def __init__(self, environment: Any, *, stops: Sequence[str] = (CALL_END,)) -> None:
        """`environment` is a `verifiers.Environment`, such as `verifiers.load_environment` returns.
        If it has tools, a reply ends at any of `stops`.

        Raises:
            InvalidRequestError: the library is missing, or has no such environments any more.
        """
        _client_class()
        self._source = environment
        self._stops = tuple(stops) if environment.tool_defs else ()
        self._loop = _LoopThread()

    def __enter__(self) -> "VerifiersTasks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the environment's tools, for `ChatText(tools=…)`."""
        return [_schema(tool) for tool in self._source.tool_defs or ()]

    def environments(
        self, count: int | None = None, *, samples: int = 1, seed: int = 0
    ) -> list["VerifiersEnvironment"]:
        """`samples` environments for each of `count` rows of the dataset, one behind the other. The
        rows are drawn with `seed`; without `count` they are all there are, in their order.

        Raises:
            InvalidRequestError: there are fewer rows.
        """
        dataset = self._source.get_dataset()
        if count is None:
            chosen = list(range(len(dataset)))
        elif 0 <= count <= len(dataset):
            chosen = random.Random(seed).sample(range(len(dataset)), count)
        else:
            raise InvalidRequestError(
                f"count is {count}, and the dataset has {len(dataset)} rows: draw no more",
                parameter="count",
            )
        return [self.environment(dataset[at]) for at in chosen for _ in range(samples)]

    def environment(self, row: Mapping[str, Any]) -> "VerifiersEnvironment":
        """An environment for a row: `prompt`, `example_id`, and mostly `answer` or `info`."""
        return VerifiersEnvironment(self._source, row, self._loop, self._stops)

    def score_group(self, environments: Sequence["VerifiersEnvironment"]) -> list[float]:
        """Rewards of environments of one row, in their order, by a rubric that compares them.
        Until then their trajectories have the reward 0.

        Raises:
            ConflictError: one of them has not ended, or the tasks are closed.
        """
        states = [environment.state for environment in environments]
        if None in states:
            raise ConflictError(
                f"environment {states.index(None)} has not ended: score `done` trajectories, or "
                "`finish` it"
            )
        self._loop.submit(self._source.rubric.score_group(states)).result()
        return [float(state["reward"]) for state in states]

    def close(self) -> None:
        """End the rollouts that have not ended, and the thread. One that a tool keeps busy for
        more than `CLOSE_S` ends when the tool does."""
        self._loop.close()


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._submitting = threading.Lock()
        self._is_closed = False
        # A daemon: a tool that hangs must not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt):
                # Of a task, which has it as its error; the other rollouts go on.
                continue
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        """Run `work` in the loop. Raises `ConflictError`: it is closed."""
        with self._submitting:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ConflictError("the tasks are closed: make a VerifiersTasks")

    def call_soon(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work` in the loop, unless that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *arguments)

    def close(self) -> None:
        """Cancel all work, and end the thread."""
        with self._submitting:
            if self._is_closed:
                return
            self._is_closed = True
            ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        ended.add_done_callback(lambda _: self.call_soon(self._loop.stop))
        self._thread.join(CLOSE_S)


class VerifiersEnvironment:
    """One rollout of an environment of `verifiers`, made by `VerifiersTasks`."""

    def __init__(
        self,
        source: Any,
        row: Mapping[str, Any],
        loop: _LoopThread,
        stops: Sequence[str] = (),
    ) -> None:
        """`source` is the library's environment, whose rollouts all run in `loop`; a reply ends at
        any of `stops`."""
        self._source, self._row, self._loop = source, dict(row), loop
        self.stops: Sequence[str] = tuple(stops)
        self.state: Any = None
        """The library's state of the rollout: `reward`, `metrics`, `stop_condition` and others.
        None: it has not ended."""
        self._turns: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
        self._turn = _Turn()
        self._rollout: Future[None] | None = None
        self._known: list[Message] = []
        """The conversation up to the last reply."""

    def reset(self) -> Observation:
        """As `Environment.reset`.

        Raises:
            ConflictError: the tasks are closed.
            ExecutionError: the rollout has ended before its first turn.
        """
        self.close()
        turns: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
        self._turns, self._known, self.state = turns, [], None
        self._rollout = self._loop.submit(self._play(turns))
        self._rollout.add_done_callback(partial(_end_closed, turns))
        self._turn = turns.get()
        if self._turn.asked is None:
            raise ExecutionError("the environment asked for no reply") from self._turn.error
        return self._turn.observation

    def step(self, reply: str) -> Step:
        """As `Environment.step`. The whole reward comes with the last step.

        Raises:
            InvalidRequestError: the environment has rewritten the conversation, or shows the model
                tools that are not in `VerifiersTasks.tools`.
            Exception: the error with which the rollout has ended.
        """
        self._answer(reply)
        is_done = self._turn.asked is None
        return Step(observation=self._turn.observation, reward=self._turn.reward, done=is_done)

    def finish(self) -> float:
        """End a rollout that waits for a reply as one whose prompt is too long, and return its
        reward: for trajectories that ended by `turns` or `length`. Raises as `step`."""
        from verifiers.errors import OverlongPromptError

        self._answer(OverlongPromptError("the trajectory has ended"))
        return self._turn.reward

    def close(self) -> None:
        """End the rollout, if it has not ended. Nothing is scored."""
        if self._rollout is not None:
            self._rollout.cancel()

    def _answer(self, reply: str | Exception) -> None:
        """Answer what the rollout waits for, and take its next turn. Raises as `step`."""
        if self._turn.asked is not None:
            # In a loop that is closed, the rollout's end is in the queue.
            self._loop.call_soon(_settle, self._turn.asked, reply)
            self._turn = self._turns.get()
        if self._turn.error is not None:
            raise self._turn.error

    async def _play(self, turns: "queue.SimpleQueue[_Turn]") -> None:
        """The whole rollout."""
        source = self._source
        try:
            client = _client_class()(partial(self._ask, turns))
            state = await source.rollout(self._row, client, MODEL, {})
            if source.score_rollouts and not source.rubric.has_group_rewards:
                await source.rubric.score_rollout(state)
            await source.rubric.cleanup(state)
            self.state = state
            turns.put(_Turn(reward=float(state["reward"] or 0.0), error=state.get("error")))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            turns.put(_Turn(error=error))
        except BaseException as error:
            # Such as `SystemExit` of a tool, which would end the loop of all rollouts.
            ended = ExecutionError(f"the environment raised {error!r}")
            ended.__cause__ = error
            turns.put(_Turn(error=ended))

    async def _ask(
        self, turns: "queue.SimpleQueue[_Turn]", messages: Sequence[Any], tools: Sequence[Any]
    ) -> Any:
        """The library's response to a request: the model's reply."""
        if [_schema(tool) for tool in tools] != [_schema(t) for t in self._source.tool_defs or ()]:
            raise InvalidRequestError(f"this row has tools of its own: {_OTHERWISE}")
        conversation = [_message(each) for each in messages]
        known = len(self._known)
        if conversation[:known] != self._known:
            raise InvalidRequestError(f"the environment rewrites earlier messages: {_OTHERWISE}")
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        turns.put(_Turn(asked=asked, observation=conversation[known:]))
        response = _response(await asked, len(conversation), has_tools=bool(tools))
        self._known = [*conversation, _message(response.message)]
        return response


_OTHERWISE = "give it `rollout.openai(trajectory)` as a client, and train on what was captured"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """What a rollout does next: it asks for a reply, or it has ended."""

    asked: asyncio.Future[str] | None = None
    observation: Sequence[Message] = ()
    reward: float = 0.0
    error: Exception | None = None


def _end_closed(turns: "queue.SimpleQueue[_Turn]", rollout: "Future[None]") -> None:
    if rollout.cancelled():
        turns.put(_Turn(error=ConflictError("the rollout was closed")))


def _settle(asked: asyncio.Future[str], reply: str | Exception) -> None:
    if asked.done():
        return  # The library has given up, such as after its own timeout.
    if isinstance(reply, str):
        asked.set_result(reply)
    else:
        asked.set_exception(reply)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@cache
def _client_class() -> Any:
    try:
        from verifiers.clients import Client
    except ImportError as error:
        raise InvalidRequestError(
            "these environments need `verifiers` below 0.4: pip install 'plexrl[verifiers]'. Those "
            "of later versions take `rollout.openai(trajectory)` as their model's endpoint"
        ) from error

    class RollOutClient(Client):  # type: ignore[misc]  # the library is not typed here
        """Hands requests to the function that it is made with."""

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            del model, sampling_args
            return await self.client(prompt, tools or ())

    # The abstract ones turn requests into a provider's form and back.
    RollOutClient.__abstractmethods__ = frozenset()
    return RollOutClient


def _response(reply: str, turn: int, *, has_tools: bool) -> Any:
    """A reply in the library's form. Calls are read as models of the Qwen and Hermes families write
    them."""
    from verifiers.types import Response, ResponseMessage, ToolCall

    text, found = split_calls(reply) if has_tools else (reply, [])
    calls = [
        ToolCall(id=f"call-{turn}-{at}", name=each.name, arguments=each.arguments)
        for at, each in enumerate(found)
    ]
    message = ResponseMessage(
        content=text,
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return Response(id=MODEL, created=0, model=MODEL, message=message)


def _message(message: Any) -> Message:
    """A message of the library in the form that chat templates read.

    Raises:
        InvalidRequestError: it has images or other parts that are no text.
    """
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.get("tool_call_id"):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise InvalidRequestError("a message has a part that is no text: this model reads texts")
    return "".join(part["text"] for part in parts)


def _schema(tool: Any) -> dict[str, Any]:
    """A tool of the library as `tool_schema` writes one."""
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names}}

"""Environments of the real `verifiers`, played by replies."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plexrl.environments import VerifiersEnvironment, VerifiersTasks
from plexrl.environments.adapters import verifiers as adapter
from plexrl.errors import ConflictError, ExecutionError, InvalidRequestError

pytest.importorskip("verifiers.clients", reason="pip install 'plexrl[verifiers]'")
vf = pytest.importorskip("verifiers")
datasets = pytest.importorskip("datasets")

ROWS = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(6)]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 1}}</tool_call>'


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


def is_right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def length(completion: Any) -> float:
    return float(len(completion))


def rubric() -> Any:
    return vf.Rubric(funcs=[is_right, length], weights=[1.0, 0.25])


def rows(path: Path) -> Any:
    """The rows as the library reads them from a local file."""
    (path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return datasets.load_dataset(
        "json", data_files=str(path / "rows.jsonl"), split="train", cache_dir=str(path / "cache")
    )


@pytest.fixture
def opened() -> Iterator[list[VerifiersTasks]]:
    """Tasks that are closed at the end of the test."""
    made: list[VerifiersTasks] = []
    yield made
    for tasks in made:
        tasks.close()


@pytest.fixture
def tools(tmp_path: Path, opened: list[VerifiersTasks]) -> VerifiersTasks:
    opened.append(VerifiersTasks(vf.ToolEnv(tools=[add], dataset=rows(tmp_path), rubric=rubric())))
    return opened[-1]


class Counting(vf.MultiTurnEnv):  # type: ignore[misc,name-defined]  # no types without the library
    """Answers each reply with the number of replies so far."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        del messages
        if state["answer"] == "fails":
            raise vf.InfraError("the sandbox is gone")
        return [{"role": "user", "content": f"reply {len(state['trajectory'])}"}]


class Forgetting(Counting):
    """Shows the model its last reply only."""

    async def get_prompt_messages(self, state: Any) -> Any:
        found = await super().get_prompt_messages(state)
        return found if len(found) == 1 else found[1:]


def only(opened: list[VerifiersTasks], kind: Any, answer: str = "a", **settings: Any) -> Any:
    """An environment of a dataset of one row."""
    dataset = datasets.Dataset.from_list([{"question": "begin", "answer": answer}])
    opened.append(VerifiersTasks(kind(dataset=dataset, **settings)))
    return opened[-1].environments()[0]


def test_a_tool_s_output_is_read_and_the_rubric_scores_the_last_reply(
    tools: VerifiersTasks,
) -> None:
    environment = tools.environments()[2]
    assert environment.reset() == [{"role": "user", "content": "2 + 1?"}]
    called = environment.step(f"let me see {CALL}")
    output = called.observation[0]
    assert isinstance(output, dict)
    assert (output["role"], output["content"], called.done) == ("tool", "3", False)
    last = environment.step("3")
    assert (last.reward, last.done) == (1.0 + 0.25 * 3, True)
    assert environment.state["metrics"]["add_calls"] == 1
    assert environment.state["stop_condition"] == "no_tools_called"


def test_tools_are_shown_as_chat_templates_want_them(tools: VerifiersTasks) -> None:
    (schema,) = tools.tools
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["required"]) == {"a", "b"}
    assert tools.environments()[0].stops == ("</tool_call>",)


def test_the_library_s_own_rollout_of_the_same_replies_is_equal(
    tools: VerifiersTasks, tmp_path: Path
) -> None:
    replies = [f"let me see {CALL}", "3"]
    environment = tools.environments()[2]
    environment.reset()
    for reply in replies:
        environment.step(reply)
    own = vf.ToolEnv(tools=[add], dataset=rows(tmp_path), rubric=rubric())
    left = iter(replies)

    class Scripted(vf.Client):  # type: ignore[misc,name-defined]  # as above
        async def get_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            return adapter._response(next(left), len(prompt), has_tools=True)

    Scripted.__abstractmethods__ = frozenset()
    state = asyncio.run(own.rollout(own.get_dataset()[2], Scripted(None), "model"))
    asyncio.run(own.rubric.score_rollout(state))
    for name in ("prompt", "completion", "reward", "metrics", "stop_condition"):
        assert environment.state[name] == state[name], name


def test_a_single_turn_ends_with_its_reply(opened: list[VerifiersTasks]) -> None:
    environment = only(opened, vf.SingleTurnEnv, rubric=rubric(), system_prompt="be brief")
    assert [each["role"] for each in environment.reset()] == ["system", "user"]
    ended = environment.step(f"a{CALL}")
    assert (ended.reward, ended.done) == (0.25, True), "without tools a call is text"
    assert environment.reset(), "it begins anew"
    assert environment.step("a").reward == 1.25


def test_turns_go_on_until_the_environment_ends_them(opened: list[VerifiersTasks]) -> None:
    environment = only(opened, Counting, rubric=rubric(), max_turns=3)
    environment.reset()
    for turn in (1, 2):
        answered = environment.step("b")
        assert answered.observation == [{"role": "user", "content": f"reply {turn}"}]
    assert environment.step("a").done


def test_a_trajectory_that_was_cut_off_is_scored_when_it_is_finished(
    opened: list[VerifiersTasks],
) -> None:
    environment = only(opened, Counting, rubric=rubric())
    environment.reset()
    environment.step("a")
    assert environment.finish() == 1.25
    assert environment.state["prompt_too_long"]
    assert environment.finish() == 1.25, "once is enough"


@pytest.mark.parametrize(
    ("kind", "answer", "error"),
    [(Counting, "fails", "the sandbox is gone"), (Forgetting, "a", "rewrites earlier messages")],
)
def test_an_error_of_a_rollout_is_raised(
    opened: list[VerifiersTasks], kind: Any, answer: str, error: str
) -> None:
    environment = only(opened, kind, answer=answer, rubric=rubric())
    environment.reset()
    with pytest.raises((vf.Error, InvalidRequestError), match=error):
        environment.step("b")


def test_a_rollout_without_a_first_turn_is_an_error(opened: list[VerifiersTasks]) -> None:
    class Unready(Counting):
        async def setup_state(self, *_: Any) -> Any:
            raise vf.InfraError("no sandbox")

    with pytest.raises(ExecutionError) as raised:
        only(opened, Unready, rubric=rubric()).reset()
    assert "no sandbox" in str(raised.value.__cause__)


def test_closing_ends_the_rollouts_that_wait(opened: list[VerifiersTasks]) -> None:
    environment = only(opened, Counting, rubric=rubric())
    environment.reset()
    opened[-1].close()
    with pytest.raises(ConflictError, match="the rollout was closed"):
        environment.step("b")
    with pytest.raises(ConflictError, match="the tasks are closed"):
        environment.reset()


def test_a_tool_that_exits_ends_its_rollout_alone(opened: list[VerifiersTasks]) -> None:
    class Exiting(Counting):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            if messages[-1]["content"] == "exit":
                sys.exit(3)
            return await super().env_response(messages, state)

    for timeout_s in (None, 60.0):  # With one, the library plays in a task of its own.
        first = only(opened, Exiting, rubric=rubric(), timeout_seconds=timeout_s)
        other = opened[-1].environment(dict(first._row))
        first.reset()
        other.reset()
        with pytest.raises(ExecutionError, match="SystemExit"):
            first.step("exit")
        assert other.step("b").observation == [{"role": "user", "content": "reply 1"}]


def test_closing_waits_neither_for_a_busy_tool_nor_for_a_rollout_that_has_not_begun(
    opened: list[VerifiersTasks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "CLOSE_S", 0.01)
    is_busy, goes_on = threading.Event(), threading.Event()

    class Busy(Counting):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            is_busy.set()
            goes_on.wait(60)
            return await super().env_response(messages, state)

    busy = only(opened, Busy, rubric=rubric())
    new = opened[-1].environment(dict(busy._row))
    busy.reset()
    with ThreadPoolExecutor() as threads:
        step = threads.submit(busy.step, "a")
        assert is_busy.wait(60)
        begun = threads.submit(new.reset)
        while new._rollout is None:
            pass
        opened[-1].close()
        goes_on.set()
        for waits in (step, begun):
            waits.exception(60)  # It has ended, in one way or another.
    with pytest.raises(ConflictError, match="closed"):
        busy.step("a")
    with pytest.raises(ConflictError, match="the tasks are closed"):
        opened[-1].score_group([])


def test_a_rubric_that_compares_scores_a_whole_group(opened: list[VerifiersTasks]) -> None:
    def best(completions: Any) -> list[float]:
        found = [len(completion[-1]["content"]) for completion in completions]
        return [float(each == max(found)) for each in found]

    dataset = datasets.Dataset.from_list(ROWS)
    environment = vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[best]))
    opened.append(VerifiersTasks(environment))
    group: list[VerifiersEnvironment] = opened[-1].environments(1, samples=3)
    for member in group:
        member.reset()
    assert [group[at].step("a" * (at + 1)).reward for at in (0, 1)] == [0.0, 0.0]
    with pytest.raises(ConflictError, match="environment 2 has not ended"):
        opened[-1].score_group(group)
    group[2].step("a")
    assert opened[-1].score_group(group) == [0.0, 1.0, 0.0]


def test_rows_are_drawn_by_the_seed(tools: VerifiersTasks) -> None:
    def asked(seed: int) -> list[Any]:
        return [each.reset() for each in tools.environments(3, samples=2, seed=seed)]

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)
    first, again, other, *_ = asked(1)
    assert first == again
    assert first != other
    with pytest.raises(InvalidRequestError, match="the dataset has 6 rows"):
        tools.environments(7)


def test_a_later_library_is_refused_with_what_to_do(
    opened: list[VerifiersTasks], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter._client_class.cache_clear()
    monkeypatch.setitem(sys.modules, "verifiers.clients", None)
    with pytest.raises(InvalidRequestError, match=r"below 0.4.*rollout.openai"):
        only(opened, vf.SingleTurnEnv, rubric=rubric())

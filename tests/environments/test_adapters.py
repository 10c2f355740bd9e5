"""Environments and tasks of other libraries, each with the real one where it is installed."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plexrl import rewards
from plexrl.environments import (
    GymEnvironment,
    OpenEnvEnvironment,
    dataset_tasks,
    reasoning_gym_tasks,
)
from plexrl.errors import InvalidRequestError
from tests.free_ports import free_port


def test_an_environment_of_gymnasium_is_played_by_replies() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    made = gymnasium.make("CliffWalking-v1", max_episode_steps=2)
    moves = {"up": 0, "right": 1, "down": 2, "left": 3}

    def act(reply: str) -> int:
        if reply not in moves:
            raise ValueError(reply)
        return moves[reply]

    environment = GymEnvironment(made, act=act, describe=lambda place: f"at {place}", seed=3)
    assert environment.reset() == "at 36"
    first = environment.step("up")
    assert (first.observation, first.reward, first.done) == ("at 24", -1.0, False)
    assert environment.step("up").done, "a truncated episode is over"
    environment.reset()
    assert environment.step("sideways").done, "a reply without an action ends it"


@pytest.fixture(scope="module")
def openenv_url() -> Iterator[str]:
    """A real OpenEnv server, whose environment counts down from what its action adds to."""
    server = pytest.importorskip("openenv.core.env_server.http_server")
    types = pytest.importorskip("openenv.core.env_server.types")
    interfaces = pytest.importorskip("openenv.core.env_server.interfaces")
    import uvicorn

    class Guess(types.Action):  # type: ignore[misc,name-defined]  # no types without the library
        number: int

    class Seen(types.Observation):  # type: ignore[misc,name-defined]  # as above
        text: str

    class Guessing(interfaces.Environment):  # type: ignore[misc,name-defined]  # as above
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, *_: Any, **__: Any) -> Seen:
            return Seen(text="guess", done=False, reward=None)

        def step(self, action: Guess, *_: Any, **__: Any) -> Seen:
            is_right = action.number == 7
            return Seen(text="no", done=is_right, reward=float(is_right))

        @property
        def state(self) -> Any:
            return types.State()

    app = server.create_fastapi_app(Guessing, Guess, Seen)
    port = free_port()
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join()


def test_an_environment_behind_a_server_of_openenv_is_played_by_replies(openenv_url: str) -> None:
    clients = pytest.importorskip("openenv.core.generic_client")
    client = clients.GenericEnvClient(base_url=openenv_url).sync()
    environment = OpenEnvEnvironment(
        client, act=lambda reply: {"number": int(reply)}, describe=lambda seen: str(seen["text"])
    )
    assert environment.reset() == "guess"
    wrong = environment.step("6")
    assert (wrong.observation, wrong.reward, wrong.done) == ("no", 0.0, False)
    right = environment.step("7")
    assert (right.reward, right.done) == (1.0, True)
    environment.close()
    assert environment.reset() == "guess", "it begins anew"
    environment.close()


def test_an_error_of_a_server_of_openenv_is_no_end_of_a_trajectory() -> None:
    class Broken:
        def step(self, _: object) -> None:
            raise json.JSONDecodeError("no answer", "", 0)

    with pytest.raises(ValueError, match="no answer"):
        OpenEnvEnvironment(Broken(), act=int).step("7")


def test_tasks_of_reasoning_gym_score_answers_themselves() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    tasks = list(reasoning_gym_tasks("chain_sum", size=3, seed=7))
    entries = list(reasoning_gym.create_dataset("chain_sum", size=3, seed=7))
    assert [task.prompt for task in tasks] == [entry["question"] for entry in entries]
    assert [task.score(f" {e['answer']}\n") for task, e in zip(tasks, entries, strict=True)] == [
        1.0
    ] * 3
    assert tasks[0].score("no number") < 1.0


def write_rows(folder: Path, form: str) -> Path:
    path = folder / f"rows.{form}"
    rows = [{"q": "two", "a": "2"}, {"q": "three", "a": "3"}]
    if form == "csv":
        path.write_text("q,a\ntwo,2\nthree,3\n")
    elif form == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


CSV_STAYS_OPEN = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
"""Some versions of `datasets` leave the file to the garbage collector."""


@CSV_STAYS_OPEN
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_rows_of_a_local_file_are_tasks(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = write_rows(tmp_path, form)
    tasks = list(dataset_tasks(path, question="q", answer="a", grade=rewards.numeric))
    assert [task.prompt for task in tasks] == ["two", "three"]
    assert [task.score("3.0") for task in tasks] == [0.0, 1.0]


@CSV_STAYS_OPEN
def test_a_missing_column_is_refused_with_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InvalidRequestError, match="no column question: name two of q, a"):
        dataset_tasks(write_rows(tmp_path, "csv"), answer="a")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'plexrl\[reasoning-gym\]'"):
        next(reasoning_gym_tasks("chain_sum", size=1, seed=1))

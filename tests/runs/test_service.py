"""The service of runs, with a router that answers as it is told, and processes that only wait."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import httpx
import pytest

from plexrl.errors import SandboxError
from plexrl.runs import service
from plexrl.runs.records import RunRecords, RunSpec, RunState
from plexrl.runs.service import RunsConfig, RunService

P = ParamSpec("P")


def blocking(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs in an event loop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def seen(what: Callable[[], bool]) -> None:
    """Wait for something."""
    for _ in range(2000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not happen")


class Router:
    """Gives keys, and forgets revoked ones; `keys_max` at a time."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.keys_max = 16
        self.job = ""
        self.made = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "POST" and path.endswith("/keys"):
            if len(self.keys) == self.keys_max:
                return httpx.Response(409, json={})
            self.made += 1
            self.keys.add(f"key-{self.made}")
            return httpx.Response(201, json={"key": f"key-{self.made}", "api_key": "secret"})
        if request.method == "DELETE":
            self.keys.discard(path.rpartition("/")[2])
            return httpx.Response(204)
        if request.method == "GET" and self.job:
            return httpx.Response(200, json={"state": self.job})
        return httpx.Response(404, json={})


class Waiting:
    """A process that runs until it is killed."""

    code: int | None = None

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def exit_code(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = 137


class Failing(Waiting):
    """A process that fails at once."""

    code = 1


def refused(*_: object, **__: object) -> Any:
    raise SandboxError("no sandbox here")


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    return RunRecords(tmp_path / "runs")


def add(records: RunRecords, run: str) -> None:
    spec = RunSpec(run=run, tenant="lab", script="a", files={"a": b""}, created_at=1.0)
    records.add(spec, live_max=10)


@asynccontextmanager
async def serving(
    records: RunRecords, router: Router, monkeypatch: pytest.MonkeyPatch, process: Any
) -> AsyncIterator[Callable[..., Any]]:
    """A service of one run at a time; gives a function that waits for something."""
    monkeypatch.setattr(service, "ControllerProcess", process)
    monkeypatch.setattr(service, "LOOK_S", 0.01)
    monkeypatch.setattr(service, "RESTART_S", 0.01)
    data = str(records.folder.parent)
    served = RunService(RunsConfig(data_dir=data, routers=("http://router",), at_once=1))
    served._client = httpx.AsyncClient(transport=httpx.MockTransport(router))
    stop = asyncio.Event()
    task = asyncio.create_task(served.serve(stop))

    async def until(run: str, state: str) -> RunState:
        await seen(lambda: task.done() or records.state(run).state == state)
        assert not task.done(), "the service has ended"
        return records.state(run)

    yield until
    stop.set()
    await task


@blocking
async def test_a_tenant_without_a_further_key_waits_and_others_go_on(
    records: RunRecords, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.keys_max = 0
    add(records, "run-1")
    async with serving(records, router, monkeypatch, Waiting) as until:
        await seen(lambda: "waits for an API key" in records.state("run-1").reason)
        records.stop("run-1")
        await until("run-1", "stopped")


@blocking
async def test_a_run_that_no_sandbox_takes_keeps_no_key(
    records: RunRecords, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(records, "run-1")
    async with serving(records, router, monkeypatch, refused) as until:
        assert (await until("run-1", "failed")).reason == "no sandbox here"
        assert (router.made, router.keys) == (1, set())


@blocking
async def test_a_full_disk_leaves_no_keys(
    records: RunRecords, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    add(records, "run-1")
    with monkeypatch.context() as disk:
        disk.setattr(RunRecords, "write_state", full)
        async with serving(records, router, monkeypatch, Waiting):
            await seen(lambda: router.made >= 3)
    assert len(router.keys) <= 1, "at most that of an attempt that was under way"


@blocking
async def test_a_run_that_waits_for_others_is_stopped_at_once(
    records: RunRecords, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(records, "run-1")
    async with serving(records, router, monkeypatch, Waiting) as until:
        await until("run-1", "running")
        add(records, "run-2")
        await asyncio.sleep(0.1)
        assert records.state("run-2").state == "waiting"
        records.stop("run-2")
        await until("run-2", "stopped")
        assert records.state("run-1").state == "running"


@pytest.mark.parametrize(("job", "end"), [("FAILED", "failed"), ("COMPLETED", "completed")])
@blocking
async def test_a_run_whose_job_has_ended_is_not_started_again(
    records: RunRecords, router: Router, monkeypatch: pytest.MonkeyPatch, job: str, end: str
) -> None:
    router.job = job
    add(records, "run-1")
    async with serving(records, router, monkeypatch, Failing) as until:
        assert (await until("run-1", end)).attempts == 1


@blocking
async def test_a_fault_of_one_run_does_not_end_the_service(
    records: RunRecords, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(records, "run-1")
    (records.folder / "run-1" / "spec.json").write_text("{")
    async with serving(records, router, monkeypatch, Failing):
        await asyncio.sleep(0.2)
        (records.folder / "run-1" / "spec.json").unlink()

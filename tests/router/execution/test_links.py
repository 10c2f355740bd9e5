"""The router's connections survive faults of the scheduler and of workers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import (
    ConflictError,
    ConnectionLostError,
    DeviceMemoryFullError,
    StorageFullError,
    UnavailableError,
)
from plexrl.ids import BlobRef, DeploymentId, FencingToken, OperationId
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.router.execution.deployment_specs import DeploymentSpecs
from plexrl.router.execution.executor import Executor
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.execution.worker_link import WorkerGoneError, WorkerLink
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.frame_socket import FrameSocket
from plexrl.wire.messages import AbortOperation, AnyRun, WorkerName
from plexrl.wire.messages.reports import LiveWorkers, OperationFinished, WorkersGone
from plexrl.wire.operations import OperationKind
from plexrl.wire.rpc import Handler, Peer
from plexrl.wire.scheduler_methods import STATUS
from plexrl.worker.process.server.server import WorkerServer
from tests.certificates import TestAuthority
from tests.small_disk import SmallDisk, small_disk
from tests.wire.runs import make_run

Plain = dict[str, Any]
LIMIT_S = 30.0
INCARNATION = 3


def worker(rank: int) -> WorkerName:
    return WorkerName("j/a", rank, INCARNATION)


async def in_time(work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await work


async def scheduler_at(address: Path, handlers: dict[str, Handler]) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Peer(reader, writer, handlers).run()

    return await asyncio.start_unix_server(serve, address)


async def nothing(peer: Peer, params: Plain) -> Plain:
    del peer, params
    return {}


def abort_of(*addresses: str) -> AbortOperation:
    return AbortOperation(
        operation=OperationId("o"),
        deployment=DeploymentId("j/a"),
        addresses=tuple(f"unix:{path}" for path in addresses),
        incarnation=INCARNATION,
    )


@asynccontextmanager
async def worker_at(
    address: Path,
) -> AsyncIterator[tuple["asyncio.Queue[Plain]", list[FrameSocket]]]:
    """A worker that only listens: its received messages and its connections."""
    received: asyncio.Queue[Plain] = asyncio.Queue()
    connections: list[FrameSocket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.setblocking(False)
        listening.bind(str(address))
        listening.listen(8)

        async def serve() -> None:
            connected, _ = await asyncio.get_running_loop().sock_accept(listening)
            connections.append(FrameSocket(connected))
            while True:
                received.put_nowait((await connections[0].receive())[0])

        serving = asyncio.create_task(serve())
        try:
            yield received, connections
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for each in connections:
                each.close()


def test_an_abort_reaches_the_remaining_workers(tmp_path: Path) -> None:
    async def run() -> Plain:
        executor = Executor(DirectoryBlobStore(tmp_path / "blobs"))
        # The first address never had a worker; the worker of the second has ended.
        (tmp_path / "w0").touch()
        abort = abort_of(*(str(tmp_path / name) for name in ("none", "w0", "w1")))
        async with worker_at(tmp_path / "w1") as (received, _):
            await in_time(executor.on_abort(abort))
            found: Plain = await in_time(received.get())
            await executor.close()
        return found

    assert asyncio.run(run())["request"] == "abort"


def test_a_repeated_run_keeps_its_reply_when_the_earlier_one_ends(tmp_path: Path) -> None:
    async def run() -> Plain:
        async with worker_at(tmp_path / "w") as (received, connections):
            link = WorkerLink(worker(0), f"unix:{tmp_path}/w")
            former = asyncio.create_task(link.run(("o", 1), {"request": "run"}, ()))
            await in_time(received.get())
            anew = asyncio.create_task(link.run(("o", 1), {"request": "run"}, ()))
            await in_time(received.get())
            former.cancel()
            await asyncio.gather(former, return_exceptions=True)
            await connections[0].send({"reply": "finished", "operation": "o", "token": 1})
            header: Plain = (await in_time(anew))[0]
            await link.close()
        return header

    assert asyncio.run(run())["reply"] == "finished"


@pytest.mark.parametrize("said", ["gone", "live"])
def test_a_request_to_an_unreachable_worker_ends_by_the_schedulers_word_only(
    tmp_path: Path, said: str
) -> None:
    async def run() -> None:
        executor = Executor(DirectoryBlobStore(tmp_path / "blobs"))
        link = executor.link(worker(0), f"unix:{tmp_path}/none")
        running = asyncio.create_task(link.run(("o", 1), {"request": "run"}, ()))
        await asyncio.wait({running}, timeout=0.5)
        older = WorkersGone(deployment=DeploymentId("j/a"), incarnation=INCARNATION - 1)
        await executor.on_workers_gone(older)
        live = LiveWorkers(incarnations={DeploymentId("j/a"): INCARNATION})
        await executor.on_live_workers(live)
        await asyncio.sleep(0)
        assert not running.done(), "nobody has said that the worker is gone"
        if said == "gone":
            gone = WorkersGone(deployment=DeploymentId("j/a"), incarnation=INCARNATION)
            await executor.on_workers_gone(gone)
            with pytest.raises(WorkerGoneError):
                executor.link(worker(0), "unix:/anywhere")
        else:
            await executor.on_live_workers(LiveWorkers(incarnations={}))
        with pytest.raises(WorkerGoneError):
            await in_time(running)
        newer = WorkerName("j/a", 0, INCARNATION + 1)
        executor.link(newer, f"unix:{tmp_path}/none")
        await executor.close()

    asyncio.run(run())


def test_a_request_is_answered_by_a_worker_that_comes_late(tmp_path: Path) -> None:
    async def run() -> Plain:
        link = WorkerLink(worker(0), f"unix:{tmp_path}/w")
        running = asyncio.create_task(link.run(("o", 1), {"request": "run"}, ()))
        await asyncio.sleep(0)
        async with worker_at(tmp_path / "w") as (received, connections):
            assert (await in_time(received.get()))["worker"] == list(worker(0))
            await connections[0].send({"reply": "finished", "operation": "o", "token": 1})
            header: Plain = (await in_time(running))[0]
            await link.close()
        return header

    assert asyncio.run(run())["reply"] == "finished"


def test_a_worker_at_a_reused_address_runs_nothing_for_the_former_one(tmp_path: Path) -> None:
    """A real worker's socket over TLS, at the port that another worker had."""
    authority = TestAuthority(tmp_path)
    stranger = WorkerName("j/critic", 0, 9)
    listening = TlsAddress("127.0.0.1", 0, "n")
    server = WorkerServer(listening, stranger, authority.credentials(Role.NODE, "n"))
    router = authority.credentials(Role.ROUTER, "r")

    async def run() -> None:
        link = WorkerLink(worker(0), str(server.address), router)
        with pytest.raises(WorkerGoneError):
            await in_time(link.run(("o", 1), {"request": "run"}, ()))
        mine = WorkerLink(stranger, str(server.address), router)
        asked = asyncio.create_task(mine.run(("o", 1), {"request": "run"}, (bytes(5 << 20),)))
        request = await asyncio.to_thread(server.requests.get, timeout=LIMIT_S)
        assert len(request.payload) == 5 << 20
        reply = {"reply": "finished", "operation": "o", "token": 1}
        await asyncio.to_thread(request.connection.send, reply, bytes(7 << 20))
        header, payload = await in_time(asked)
        assert (header, len(payload)) == (reply, 7 << 20)
        await link.close()
        await mine.close()

    asyncio.run(run())
    assert server.requests.empty(), "the request for the former worker was taken"


def test_the_end_of_its_workers_ends_a_run_without_a_report(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            executor_at(tmp_path, tmp_path / "blobs") as (executor, reports),
            worker_at(tmp_path / "w") as (received, connections),
        ):
            command = run_of(OperationKind.BARRIER, str(tmp_path / "w"))
            await executor.on_run(command)
            await in_time(received.get())
            gone = WorkersGone(deployment=DeploymentId("j/a"), incarnation=INCARNATION)
            await executor.on_workers_gone(gone)
            async with asyncio.timeout(LIMIT_S):
                while executor.runs_count:  # noqa: ASYNC110 (no event exists)
                    await asyncio.sleep(0.01)
            assert reports.empty()
            connections[0].close()

    asyncio.run(run())


def test_hello_is_repeated_after_a_stopping_scheduler_refused_it(tmp_path: Path) -> None:
    greeted = 0

    async def hello(peer: Peer, params: Plain) -> Plain:
        nonlocal greeted
        del peer, params
        greeted += 1
        if greeted == 1:
            raise UnavailableError("the scheduler is stopping: try again in a moment")
        return {}

    async def run() -> None:
        server = await scheduler_at(tmp_path / "s", {"hello": hello, "status": nothing})
        link = SchedulerLink([f"unix:{tmp_path}/s"], "r", {})
        running = asyncio.create_task(link.run())
        await in_time(link.connected.wait())
        assert not await link.call(STATUS, {})
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()

    asyncio.run(run())
    assert greeted == 2


def test_a_bug_in_one_handler_does_not_end_the_connection_for_good(tmp_path: Path) -> None:
    greeted: asyncio.Queue[Peer] = asyncio.Queue()

    async def hello(peer: Peer, params: Plain) -> Plain:
        del params
        greeted.put_nowait(peer)
        return {}

    async def broken(peer: Peer, params: Plain) -> Plain:
        del peer, params
        raise ZeroDivisionError

    async def run() -> None:
        server = await scheduler_at(tmp_path / "s", {"hello": hello})
        link = SchedulerLink([f"unix:{tmp_path}/s"], "r", {"run": broken})
        running = asyncio.create_task(link.run())
        await in_time(link.connected.wait())
        await greeted.get_nowait().notify("run", {})
        await in_time(greeted.get())
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()

    asyncio.run(run())


def test_reports_go_together_and_those_that_a_stopping_scheduler_refused_again(
    tmp_path: Path,
) -> None:
    numbers: list[int] = []
    together, all_reported = asyncio.Event(), asyncio.Event()

    async def finished(peer: Peer, params: Plain) -> Plain:
        del peer
        number = int(params["operation"])
        numbers.append(number)
        if len(numbers) == 3:
            together.set()
        if len(numbers) == 4:
            all_reported.set()
        await together.wait()
        if number == 1 and len(numbers) == 3:
            raise UnavailableError("the scheduler is stopping: try again in a moment")
        if number == 2:
            raise ConflictError("no such operation")
        return {}

    async def run() -> None:
        server = await scheduler_at(
            tmp_path / "s", {"hello": nothing, "operation_finished": finished}
        )
        link = SchedulerLink([f"unix:{tmp_path}/s"], "r", {})
        for n in (1, 2, 3):
            link.report(OperationFinished(OperationId(f"{n}"), FencingToken(1), 0.0))
        running = asyncio.create_task(link.run())
        await in_time(all_reported.wait())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()

    asyncio.run(run())
    assert numbers == [1, 2, 3, 1]


def run_of(kind: OperationKind, *addresses: str) -> AnyRun:
    at = tuple(f"unix:{path}" for path in addresses)
    command: AnyRun = make_run(kind, deployment="j/a", addresses=at, incarnation=INCARNATION)
    return command


@asynccontextmanager
async def executor_at(
    folder: Path, blobs: Path
) -> AsyncIterator[tuple[Executor, "asyncio.Queue[tuple[str, Plain]]"]]:
    """An executor, and its reports to the scheduler."""
    reports: asyncio.Queue[tuple[str, Plain]] = asyncio.Queue()

    def note(method: str) -> Handler:
        async def taken(peer: Peer, params: Plain) -> Plain:
            del peer
            reports.put_nowait((method, params))
            return {}

        return taken

    methods = ("operation_finished", "operation_failed")
    server = await scheduler_at(
        folder / "s", {"hello": nothing, **{name: note(name) for name in methods}}
    )
    executor = Executor(DirectoryBlobStore(blobs))
    executor.scheduler = SchedulerLink([f"unix:{folder}/s"], "r", {})
    executor.specs = DeploymentSpecs(executor.scheduler)
    running = asyncio.create_task(executor.scheduler.run())
    try:
        yield executor, reports
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await executor.close()
        server.close()


def test_a_result_waits_for_disk_space_and_is_not_computed_again(tmp_path: Path) -> None:
    async def run(disk: SmallDisk) -> None:
        async with (
            executor_at(tmp_path, disk.path / "blobs") as (executor, reports),
            worker_at(tmp_path / "w") as (received, connections),
        ):
            disk.fill()
            await executor.on_run(run_of(OperationKind.BARRIER, str(tmp_path / "w")))
            await in_time(received.get())
            answer = {"reply": "finished", "operation": "o", "token": 1}
            answer |= {"result": {}, "compute_s": 0.1}
            await connections[0].send(answer, (b"x" * 5000,))
            async with asyncio.timeout(LIMIT_S):
                while executor.unstored_reason("o") is None:  # noqa: ASYNC110 (no event exists)
                    await asyncio.sleep(0.01)
            assert "free space there" in str(executor.unstored_reason("o"))
            assert reports.empty()
            disk.free()
            method, report = await in_time(reports.get())
            assert method == "operation_finished"
            assert executor.unstored_reason("o") is None
            assert received.empty(), "the workers got a second request"
            stored = await DirectoryBlobStore(disk.path / "blobs").read(BlobRef(report["result"]))
            assert bytes(stored) == b"x" * 5000

    with small_disk(tmp_path / "disk", "4m") as disk:
        asyncio.run(run(disk))


@pytest.mark.parametrize(
    ("kind", "intact"), [(OperationKind.PUBLISH, True), (OperationKind.OPTIM_STEP, False)]
)
def test_partial_failure_keeps_state_intact_only_for_unchanging_kinds(
    tmp_path: Path, kind: OperationKind, intact: bool
) -> None:
    async def run() -> Plain:
        async with (
            executor_at(tmp_path, tmp_path / "blobs") as (executor, reports),
            worker_at(tmp_path / "w0") as (heard0, connections0),
            worker_at(tmp_path / "w1") as (heard1, connections1),
        ):
            command = run_of(kind, str(tmp_path / "w0"), str(tmp_path / "w1"))
            await executor.on_run(command)
            await in_time(heard0.get())
            await in_time(heard1.get())
            name: Plain = {"operation": "o", "token": 1}
            done = {**name, "reply": "finished", "result": {}, "compute_s": 0.1}
            await connections0[0].send(done, ())
            error = StorageFullError("no room").to_wire()
            refused = {**name, "reply": "failed", "error": error, "state_intact": True}
            await connections1[0].send(refused, ())
            method, report = await in_time(reports.get())
            assert method == "operation_failed"
            return report  # type: ignore[no-any-return]

    assert asyncio.run(run())["state_intact"] is intact


def test_a_lack_of_device_memory_is_the_cause_of_what_other_ranks_report(tmp_path: Path) -> None:
    async def run() -> Plain:
        async with (
            executor_at(tmp_path, tmp_path / "blobs") as (executor, reports),
            worker_at(tmp_path / "w0") as (heard0, connections0),
            worker_at(tmp_path / "w1") as (heard1, connections1),
        ):
            command = run_of(OperationKind.LOAD, str(tmp_path / "w0"), str(tmp_path / "w1"))
            await executor.on_run(command)
            await in_time(heard0.get())
            await in_time(heard1.get())
            failed: Plain = {"operation": "o", "token": 1, "reply": "failed"}
            lost = ConnectionLostError("rank 1 does not answer").to_wire()
            full = DeviceMemoryFullError("no room", rank=1).to_wire()
            await connections0[0].send({**failed, "error": lost, "state_intact": False}, ())
            await connections1[0].send({**failed, "error": full, "state_intact": True}, ())
            method, report = await in_time(reports.get())
            assert method == "operation_failed"
            return report  # type: ignore[no-any-return]

    report = asyncio.run(run())
    assert report["error"]["details"] == {"rank": 1}
    assert not report["state_intact"]

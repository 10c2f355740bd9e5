"""Payloads reach the workers while the scheduler journals, and have no effect before it has.

A real router process between a scheduler and a worker of this test.
"""

import asyncio
import json
import sys
from asyncio import Queue
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

import plexrl
from plexrl.client.calls import requests
from plexrl.errors import ConflictError, ConnectionLostError, JournalFullError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.wire.framing import read_frame, write_frame
from plexrl.wire.operations import OperationKind
from plexrl.wire.rpc import Peer
from plexrl.wire.tensors import MEDIA_TYPE, encode_body
from tests.small_disk import small_disk
from tests.wire.runs import make_run

Plain = dict[str, Any]
Found = TypeVar("Found")
LIMIT_S = 60.0
ROWS = 8
SPEC = DeploymentSpec(
    model=plexrl.tiny_qwen2("0123456789"), kind="train", backend="fsdp", workers=1
)
ANSWER = encode_body({}, {"logprobs": np.zeros(ROWS * 16, dtype=np.float32)})


def batch(value: int) -> bytes:
    ones = [np.full(16, value, dtype=np.float32)] * ROWS
    arrays = {"mask": [np.ones(16, dtype=np.float32)] * ROWS, "logprobs": ones, "advantages": ones}
    rows = plexrl.Batch([[3] * 16] * ROWS, arrays)
    body = requests.forward_backward("j/a", rows, plexrl.losses.grpo(), 64).call.content
    assert body is not None
    return body


async def soon(work: Awaitable[Found]) -> Found:
    async with asyncio.timeout(LIMIT_S):
        return await work


class Surroundings:
    """The scheduler and the worker of a router."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submitted: Queue[tuple[Plain, asyncio.Future[Plain]]] = Queue()
        self.finished: Queue[Plain] = Queue()
        self.frames: Queue[tuple[Plain, bytes]] = Queue()
        self.router: Peer | None = None
        self.worker: asyncio.StreamWriter | None = None
        self.client: httpx.AsyncClient | None = None

    async def serve_router(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async def hello(peer: Peer, _: Plain) -> Plain:
            self.router = peer
            return {}

        async def submit(_: Peer, params: Plain) -> Plain:
            answer: asyncio.Future[Plain] = asyncio.get_running_loop().create_future()
            self.submitted.put_nowait((params, answer))
            return await answer

        async def finish(_: Peer, params: Plain) -> Plain:
            self.finished.put_nowait(params)
            return {}

        async def authenticate(_: Peer, __: Plain) -> Plain:
            return {"tenant": "operator", "is_operator": True}

        async def deployment(_: Peer, __: Plain) -> Plain:
            return {"spec_json": SPEC.to_json(), "tenant": "t"}

        handlers = {
            "hello": hello,
            "authenticate": authenticate,
            "get_deployment": deployment,
            "submit_operation": submit,
            "operation_finished": finish,
        }
        await Peer(reader, writer, handlers).run()

    async def work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.worker = writer
        try:
            while True:
                self.frames.put_nowait(await read_frame(reader))
        except ConnectionLostError:
            writer.close()

    def submit(self, name: str, body: bytes) -> "asyncio.Task[httpx.Response]":
        """Begin a client's request."""
        assert self.client is not None
        return asyncio.create_task(
            self.client.post(
                "/v1/jobs/j/deployments/a/operations/forward_backward",
                params={"operation": name},
                content=body,
                headers={"content-type": MEDIA_TYPE},
            )
        )

    async def accept(self, name: str, params: Plain, answer: "asyncio.Future[Plain]") -> None:
        """Answer a submission as after its commit, and order the run."""
        answer.set_result({"operation": name, "payload": params["payload"]})
        command = make_run(
            OperationKind.FORWARD_BACKWARD,
            operation=name,
            deployment="j/a",
            params=params["params"],
            payload=params["payload"],
            addresses=(f"unix:{self.folder}/w.sock",),
        )
        assert self.router is not None
        await self.router.notify("run", {"command": command})

    async def run(self, name: str) -> tuple[Plain, bytes]:
        """Answer a run of the operation; the frame that requested it."""
        header, payload = await soon(self.frames.get())
        assert (header["request"], header["run"]["operation"]) == ("run", name)
        assert self.worker is not None
        result = {"sums": {"tokens": 1.0, "loss": 0.0}}
        reply = {"reply": "finished", "operation": name, "token": 1, "compute_s": 0.0}
        await write_frame(self.worker, {**reply, "result": result}, ANSWER)
        await soon(self.finished.get())
        return header, payload


@asynccontextmanager
async def surrounded(folder: Path) -> AsyncIterator[Surroundings]:
    """A router that has executed the operation `first`."""
    around = Surroundings(folder)
    config = {
        "router": "router0",
        "scheduler": [f"unix:{folder}/s.sock"],
        "host": "127.0.0.1",
        "port": 0,
        "data_dir": str(folder / "data"),
    }
    (folder / "router.json").write_text(json.dumps(config))
    async with (
        await asyncio.start_unix_server(around.serve_router, folder / "s.sock"),
        await asyncio.start_unix_server(around.work, folder / "w.sock"),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "plexrl.router", "--config", str(folder / "router.json")),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            port = json.loads(await soon(process.stdout.readline()))["port"]
            headers = {"authorization": "Bearer key"}
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=LIMIT_S
            ) as around.client:
                first = around.submit("first", batch(1))
                await around.accept("first", *await soon(around.submitted.get()))
                assert (await around.run("first"))[1] == batch(1)
                assert (await first).status_code == 202
                yield around
        finally:
            process.kill()
            await process.wait()


def test_a_payload_is_at_its_worker_before_the_commit_and_its_run_after_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with surrounded(tmp_path) as around:
            request = around.submit("second", batch(2))
            submission = await soon(around.submitted.get())
            header, payload = await soon(around.frames.get())
            assert (header["request"], payload) == ("stage", batch(2))
            later = around.submit("third", batch(3))
            later_submission = await soon(around.submitted.get())
            assert around.frames.empty()
            assert not request.done(), "the client waits for the commit"
            await around.accept("second", *submission)
            requested, nothing = await around.run("second")
            assert (requested["staged"], nothing) == (submission[0]["payload"], b"")
            await around.accept("third", *later_submission)
            assert (await around.run("third"))[1] == batch(3), "one payload at a time comes early"
            assert [(await each).status_code for each in (request, later)] == [202, 202]

    asyncio.run(run())


def test_a_refused_operations_payload_is_discarded_everywhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with surrounded(tmp_path) as around:
            for error in (JournalFullError("full"), ConflictError("an earlier failure")):
                request = around.submit("second", batch(2))
                _, answer = await soon(around.submitted.get())
                header, _ = await soon(around.frames.get())
                assert header["request"] == "stage"
                answer.set_exception(error)
                assert (await request).json()["error"]["code"] == error.code
                header, payload = await soon(around.frames.get())
                assert (header["request"], header["payload"], payload) == ("stage", "", b"")
                assert not list((tmp_path / "data" / "blobs").glob("second*"))
                assert around.frames.empty(), "nothing was run"

    asyncio.run(run())


def test_a_run_brings_its_payload_if_the_connection_was_lost_after_the_early_transfer(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with surrounded(tmp_path) as around:
            request = around.submit("second", batch(2))
            submission = await soon(around.submitted.get())
            assert (await soon(around.frames.get()))[0]["request"] == "stage"
            assert around.worker is not None
            around.worker.close()
            await around.accept("second", *submission)
            requested, payload = await around.run("second")
            assert ("staged" in requested, payload) == (False, batch(2))
            assert (await request).status_code == 202

    asyncio.run(run())


def test_a_full_disk_refuses_a_payload_before_it_is_sent_and_delays_the_result_of_one_that_was(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        with small_disk(tmp_path / "data", "8m") as disk:
            async with surrounded(tmp_path) as around:
                disk.fill()
                refused = (await around.submit("second", batch(2))).json()
                assert refused["error"]["code"] == "storage_full"
                assert around.submitted.empty()
                assert around.frames.empty(), "the worker received a payload that is not stored"
                disk.free()
                request = around.submit("second", batch(2))
                submission = await soon(around.submitted.get())
                header, payload = await soon(around.frames.get())
                assert (header["request"], payload) == ("stage", batch(2))
                disk.fill()
                await around.accept("second", *submission)
                running = asyncio.create_task(around.run("second"))
                assert (await request).status_code == 202
                await asyncio.wait({running}, timeout=0.2)
                assert not running.done()
                disk.free()
                assert (await running)[0]["staged"] == submission[0]["payload"]
                stored = [each.read_bytes() for each in disk.path.glob("blobs/second*.out")]
                assert stored == [ANSWER]

    asyncio.run(run())

"""A sync begins when the version that it pulls is on the node; until then, tokens are drawn. What a
failed step tells."""

import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest

from plexrl.errors import ExecutionError, PayloadTooLargeError, StaleWeightsError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.statemanager.transfer.pull import PullMode
from plexrl.wire import framing
from plexrl.wire.framing import recv_frame
from plexrl.wire.messages import AnyRun, RankShare, StartRun, frame_header
from plexrl.wire.operations import GenerateParams, OperationKind, SamplingParams, SyncWeightsParams
from plexrl.wire.tensors import encode_body
from plexrl.worker.interface.backend import BackendResult
from plexrl.worker.process.server.server import ReceivedRequest, WorkerConnection
from plexrl.worker.process.worker import Worker
from plexrl.worker.rollout.engine import TorchRolloutBackend
from plexrl.worker.state.state_mover import StateMover
from tests.wire.runs import make_run

if TYPE_CHECKING:
    from plexrl.statemanager.client.client import StateManagerClient

TOKENS = 400
PULLED = SimpleNamespace(
    bytes_by_source={},
    bytes_moved=1,
    bytes_replicated=0,
    bytes_wanted=1,
    fraction=1.0,
    mode=PullMode.FULL,
    seconds=0.1,
    transfer_s=2.0,
    tier="host",
)


class Rollout(TorchRolloutBackend):
    """A rollout whose next step may fail."""

    fault: Exception | None = None

    def step(self) -> list[tuple[str, BackendResult]]:
        if self.fault is not None:
            raise self.fault
        return super().step()


class Node:
    """The StateManager's client of a rollout's rank, and the worker around it."""

    is_torn = False

    def __init__(self, folder: Path) -> None:
        spec = DeploymentSpec(
            model=tiny_qwen2("0123", hidden=32),
            kind="rollout",
            backend="torch",
            workers=1,
            max_sequence_tokens=TOKENS + 2,
            max_concurrent_samples=2,
        )
        self.backend = Rollout(spec, folder)
        self.backend.lay_out()
        self.backend.materialise()
        mover = StateMover(self.backend, cast("StateManagerClient", self), "g")
        mover.is_resident = True
        self.requests: queue.Queue[ReceivedRequest] = queue.Queue()
        self.worker = Worker(self.backend, mover, self.requests)
        self.has_come = False
        self.asked = 0
        self.drawn_at_pull: int | None = None
        self._socket, self._there = socket.socketpair()
        self._socket.settimeout(20.0)
        self._connection = WorkerConnection(self._there)

    def has_arrived(self, **wanted: Any) -> bool:
        assert (wanted["source"], wanted["seq"]) == ("a", 3)
        self.asked += 1
        return self.has_come

    def pull(self, **wanted: Any) -> Any:
        assert wanted["seq"] == 3
        self.drawn_at_pull = self.drawn
        return PULLED

    @property
    def drawn(self) -> int:
        return self.backend.stats().tokens_drawn

    def ask(self, run: AnyRun, **arrays: Any) -> None:
        header = msgspec.to_builtins(frame_header(StartRun(run=run, share=RankShare())))
        payload = bytearray(encode_body({}, arrays)) if arrays else bytearray()
        self.requests.put(ReceivedRequest(self._connection, header, payload))

    def generate(self) -> None:
        sampling = SamplingParams(max_tokens=TOKENS, seed=1, ignore_eos=True)
        command = make_run(
            OperationKind.GENERATE,
            operation="g",
            seq=0,
            params=GenerateParams(sampling=sampling),
        )
        tokens, lengths = np.array([3, 4], np.int32), np.array([2], np.int32)
        self.ask(command, tokens=tokens, lengths=lengths)
        self.until(lambda: self.drawn > 0)

    def sync(self, **params: bool) -> None:
        command = make_run(
            OperationKind.SYNC_WEIGHTS,
            operation="s",
            source_seq=3,
            sources=("tcp://there",),
            params=SyncWeightsParams(source="a", **params),
        )
        self.ask(command)

    def until(self, is_so: Any) -> None:
        for _ in range(3 * TOKENS):
            if is_so():
                return
            self.worker.run_once(block=False)
        pytest.fail("it did not happen")

    def result(self, operation: str) -> dict[str, Any]:
        while True:
            header, _ = recv_frame(self._socket)
            if header["operation"] == operation:
                assert header["reply"] == "finished", header
                return dict(header["result"])

    def error(self) -> dict[str, Any]:
        header, _ = recv_frame(self._socket)
        assert header["reply"] == "failed", header
        return dict(header["error"])

    def close(self) -> None:
        self._socket.close()
        self._there.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_a_sync_in_flight_waits_beside_the_generation_until_its_version_has_come(
    node: Node,
) -> None:
    node.generate()
    node.sync(in_flight=True, published=True)
    before = node.drawn
    node.until(lambda: node.asked and node.drawn > before + 5)
    assert node.drawn_at_pull is None
    node.has_come = True
    node.until(lambda: node.drawn_at_pull is not None)
    assert before < cast("int", node.drawn_at_pull) < TOKENS
    found = node.result("s")
    assert found["transfer_s"] == 2.0
    assert found["pause_s"] > 0
    node.until(lambda: node.drawn == TOKENS)


@pytest.mark.parametrize("has_come", [False, True])
def test_another_sync_of_a_published_version_comes_after_the_generation(
    node: Node, has_come: bool
) -> None:
    node.generate()
    node.has_come = has_come
    node.sync(published=True)
    node.until(lambda: node.drawn_at_pull is not None)
    assert node.drawn_at_pull == TOKENS
    assert node.asked, "it was not fetched beside the generation"


def test_a_sync_of_another_version_waits_for_no_fetch(node: Node) -> None:
    node.generate()
    node.sync(in_flight=True)
    node.until(lambda: node.drawn_at_pull is not None)
    assert cast("int", node.drawn_at_pull) < TOKENS
    assert not node.asked


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (StaleWeightsError("old weights"), StaleWeightsError.code),
        (ValueError("?"), ExecutionError.code),
    ],
)
def test_a_step_that_fails_ends_the_worker_and_its_generations_say_why(
    node: Node, fault: Exception, code: str
) -> None:
    node.generate()
    node.backend.fault = fault
    with pytest.raises(SystemExit):
        node.worker.run_once(block=False)
    assert node.error()["code"] == code


def test_a_result_that_no_frame_carries_fails_its_operation_and_not_the_worker(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.generate()
    with monkeypatch.context() as patch:
        patch.setattr(framing, "PAYLOAD_BYTES_MAX", 8 * TOKENS)
        node.until(lambda: node.drawn == TOKENS)
    assert node.error()["code"] == PayloadTooLargeError.code
    # The worker goes on.
    node.sync()
    node.until(lambda: node.drawn_at_pull is not None)
    assert node.result("s")["transfer_s"] == 2.0

"""Control requests to an engine are handled between two tokens."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from plexrl.ids import DeploymentId, FencingToken, OperationId
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.wire.framing import recv_frame
from plexrl.wire.messages import AbortOperation, AbortRun, AnyEngineRequest
from plexrl.wire.operations import GenerateParams, OperationKind, SamplingParams
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.process.server.control_requests import ControlRequests
from plexrl.worker.process.server.server import WorkerConnection
from plexrl.worker.process.server.token_streams import TokenStreams
from plexrl.worker.rollout.engine import TorchRolloutBackend
from plexrl.worker.state.state_mover import StateMover


class Router:
    """Sends control requests to one worker."""

    def __init__(self, backend: TorchRolloutBackend, socket_path: Path) -> None:
        # Nothing here moves state, so no server listens there.
        self.client = StateManagerClient(
            str(socket_path), deployment="j/r", rank=0, world_size=1, ticket=b""
        )
        self.mover = StateMover(backend, self.client, "g")
        self.generations: dict[str, tuple[tuple[str, int], float]] = {}
        self.controls = ControlRequests(backend, self.mover, TokenStreams(), self.generations)
        self._socket, self._there = socket.socketpair()
        self._socket.settimeout(20.0)
        self._connection = WorkerConnection(self._there)

    def began(self, operation: str, token: int) -> None:
        self.generations[operation] = ((operation, token), 0.0)
        self.controls.generation_began(operation, token)

    def abort(self, operation: str, token: int = 0) -> None:
        order = AbortOperation(
            operation=OperationId(operation),
            deployment=DeploymentId("j/r"),
            addresses=(),
            token=FencingToken(token),
        )
        self.controls.handle(AbortRun(abort=order), self._connection)

    def ask(self, request: str, **fields: Any) -> dict[str, Any]:
        header = {"request": request, "ask": "a", **fields}
        message: AnyEngineRequest = msgspec.convert(header, AnyEngineRequest)
        self.controls.handle(message, self._connection)
        header, _ = recv_frame(self._socket)
        assert (header["operation"], header["token"]) == ("a", 0)
        return header

    def close(self) -> None:
        self._socket.close()
        self._there.close()


@pytest.fixture
def backend(tmp_path: Path) -> TorchRolloutBackend:
    spec = DeploymentSpec(
        model=tiny_qwen2("0123", hidden=32),
        kind="rollout",
        backend="torch",
        workers=1,
        max_sequence_tokens=40,
        max_concurrent_samples=2,
    )
    return TorchRolloutBackend(spec, tmp_path)


@pytest.fixture
def router(backend: TorchRolloutBackend, tmp_path: Path) -> Iterator[Router]:
    made = Router(backend, tmp_path / "nobody.sock")
    yield made
    made.close()


def call(operation: str) -> BackendCall:
    sampling = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    return BackendCall(
        operation=operation,
        kind=OperationKind.GENERATE,
        params=GenerateParams(sampling=sampling),
        arrays={"tokens": np.array([3, 4], np.int32), "lengths": np.array([2], np.int32)},
        seq=0,
    )


def begin(router: Router, backend: TorchRolloutBackend, operation: str, token: int = 1) -> None:
    backend.submit(call(operation), None)
    router.began(operation, token)


def test_the_order_to_end_a_generation_may_come_before_it(
    router: Router, backend: TorchRolloutBackend
) -> None:
    router.abort("early")
    backend.lay_out()
    backend.materialise()
    router.mover.is_resident = True
    router.abort("never")
    for operation in ("early", "other"):
        begin(router, backend, operation)
    [(name, result)] = backend.step()
    assert (name, result.arrays["lengths"].tolist()) == ("early", [0])
    while not (ended := backend.step()):
        continue
    assert [(name, len(result.arrays["tokens"])) for name, result in ended] == [("other", 8)]


@pytest.mark.parametrize("before", [True, False])
def test_an_interruption_ends_one_run_of_a_generation_and_not_the_next(
    router: Router, backend: TorchRolloutBackend, before: bool
) -> None:
    backend.lay_out()
    backend.materialise()
    router.mover.is_resident = True
    if before:
        router.abort("g", token=1)
    begin(router, backend, "g", token=1)
    if not before:
        router.abort("g", token=1)
    [(_, result)] = backend.step()
    assert result.arrays["lengths"].tolist() == [0]
    begin(router, backend, "g", token=2)
    # Sent again by another router, and late.
    router.abort("g", token=1)
    while not (ended := backend.step()):
        continue
    assert ended[0][1].arrays["lengths"].tolist() == [8]


def test_a_pause_ends_when_its_time_is_over_and_not_before(
    router: Router, backend: TorchRolloutBackend
) -> None:
    assert router.ask("pause", for_s=60.0)["error"]["code"] == "conflict", "it has no weights yet"
    assert router.controls.paused_for_s() is None
    backend.lay_out()
    backend.materialise()
    router.mover.is_resident = True
    begin(router, backend, "one")
    assert router.ask("pause", for_s=3600.0)["answer"]["paused"]
    router.controls.resume_if_due()
    assert not backend.has_work
    assert 0 < (router.controls.paused_for_s() or 0) <= 3600
    # Once more, for no time at all.
    assert router.ask("pause", for_s=0.0)["answer"]["paused"]
    router.controls.resume_if_due()
    assert backend.has_work
    assert not router.ask("resume")["answer"]["paused"]
    assert router.controls.paused_for_s() is None
    assert not router.ask("engine_stats")["answer"]["paused"]


def test_an_engine_whose_weights_mix_versions_cannot_be_resumed(
    router: Router, backend: TorchRolloutBackend
) -> None:
    backend.lay_out()
    backend.materialise()
    router.mover.is_resident = True
    begin(router, backend, "one")
    assert router.ask("pause", for_s=0.0)["answer"]["paused"]
    router.client._puller.is_torn = True
    router.controls.resume_if_due()
    assert router.ask("resume")["error"]["code"] == "conflict"
    assert not backend.has_work
    assert router.controls.paused_for_s() is None, "it waits for what its agent does to it"


def test_groups_that_do_not_change_are_not_switched(
    router: Router, backend: TorchRolloutBackend
) -> None:
    backend.lay_out()
    backend.materialise()
    router.mover.is_resident = True
    refused = router.ask("set_tp", tp=2, kv="migrate")["error"]
    assert refused["code"] == "invalid_request"
    assert "create the deployment with tp_sizes" in refused["message"]
    assert router.ask("engine_stats")["answer"]["tp"] == 1

"""The start of a paced worker."""

import queue
import socket
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.framing import recv_frame
from plexrl.wire.messages import RankShare, StartRun, frame_header
from plexrl.wire.operations import OperationKind
from plexrl.worker.interface.config import WorkerConfig
from plexrl.worker.process.server.server import ReceivedRequest, WorkerConnection
from plexrl.worker.process.start import paced_rank
from tests.wire.runs import make_run

if TYPE_CHECKING:
    from plexrl.statemanager.client.client import StateManagerClient


class Unasked:
    """A StateManager's client that is asked for nothing: the backend refuses before."""

    is_torn = False


@pytest.mark.parametrize(
    ("kind", "pace", "reason"),
    [
        ("train", "h900:qwen2.5-7b", "GPU 'h900' is unknown"),
        ("rollout", "h800:qwen2.5-72b", "room for 145 GB"),
    ],
)
def test_a_pace_that_is_no_longer_valid_is_the_reason_that_the_first_load_fails(
    kind: str, pace: str, reason: str
) -> None:
    spec = DeploymentSpec(model=tiny_qwen2("0123"), kind=kind, backend="fsdp", workers=1, pace=pace)
    config = WorkerConfig(
        deployment="j/d",
        job="j",
        kind=kind,
        incarnation=1,
        rank=0,
        world_size=1,
        group="g",
        address="unix:/nowhere",
        rendezvous="",
        statemanager="",
        ticket=b"",
        checkpoint_url="",
        spec_json=spec.to_json(),
        log_path="",
        threads=1,
    )
    requests: queue.Queue[ReceivedRequest] = queue.Queue()
    worker = paced_rank(config, spec)(cast("StateManagerClient", Unasked()), requests)
    here, there = socket.socketpair()
    with here, there:
        load = StartRun(run=make_run(OperationKind.LOAD), share=RankShare())
        header = msgspec.to_builtins(frame_header(load))
        requests.put(ReceivedRequest(WorkerConnection(there), header, bytearray()))
        worker.run_once(block=False)
        here.settimeout(10.0)
        reply, _ = recv_frame(here)
    assert reply["reply"] == "failed"
    assert reason in reply["error"]["message"]

"""Messages arrive as they were sent, one type for each."""

import asyncio
from typing import Any

import msgspec
import pytest

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.wire.framing import Header
from plexrl.wire.messages import (
    RUNS,
    AbortOperation,
    AbortRun,
    AnyRun,
    EngineLoad,
    EngineStatistics,
    Failed,
    Finished,
    LaunchWorkers,
    Pause,
    RankPlacement,
    RankShare,
    ReadStream,
    Reply,
    Resume,
    SetTp,
    StartRun,
    WorkerRequest,
    frame_header,
    read_reply,
    read_request,
    read_run,
)
from plexrl.wire.operations import (
    AdamParams,
    CheckpointParams,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    LossSpec,
    OperationKind,
    SamplingParams,
    SyncWeightsParams,
)
from plexrl.wire.rpc import as_type, on_command
from tests.wire.runs import make_run

PARAMS: dict[OperationKind, Any] = {
    OperationKind.FORWARD: ForwardParams(micro_batch_tokens=3),
    OperationKind.FORWARD_BACKWARD: ForwardBackwardParams(
        loss=LossSpec(name="decoupled_ppo", token_range=(0.5, 2.0))
    ),
    OperationKind.OPTIM_STEP: AdamParams(learning_rate=0.5),
    OperationKind.GENERATE: GenerateParams(
        sampling=SamplingParams(seed=1, stop_sequences=((1, 2), (3,))), stream="rows"
    ),
    OperationKind.SAVE_CHECKPOINT: CheckpointParams(name="c", keep_last=2),
    OperationKind.LOAD_CHECKPOINT: CheckpointParams(name="c", job="other"),
    OperationKind.SYNC_WEIGHTS: SyncWeightsParams(source="j/actor", delta=True),
}


def over_the_wire(header: Header) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(header))


def run_of(kind: OperationKind) -> AnyRun:
    fields: dict[str, Any] = {"addresses": ("a", "b"), "token": 3, "seq": 7}
    if kind in PARAMS:
        fields["params"] = PARAMS[kind]
    run: AnyRun = make_run(kind, **fields)
    return run


def test_every_kind_of_operation_has_one_type() -> None:
    assert {run.kind for run in RUNS} == set(OperationKind)
    assert len(RUNS) == len(OperationKind)
    assert all(run.__struct_config__.tag == run.kind.value for run in RUNS)


@pytest.mark.parametrize("kind", OperationKind)
def test_a_run_reaches_router_and_worker_with_its_parameters(kind: OperationKind) -> None:
    run = run_of(kind)
    routed = read_run(over_the_wire({"command": run})["command"])
    assert (type(routed), routed, routed.name) == (type(run), run, ("o", 3))
    request = StartRun(run=routed, share=RankShare(micro_batches=2, denominator=1.5))
    header = over_the_wire({**frame_header(request), "worker": ("j/actor", 0, 1)})
    assert read_request(header) == request


@pytest.mark.parametrize(
    "request_",
    [
        AbortRun(
            abort=AbortOperation(operation="o", deployment="d", addresses=("a",), rows=(1, 2))
        ),
        EngineStatistics(ask="a"),
        EngineLoad(ask="a"),
        Pause(ask="a", for_s=2.0),
        Resume(ask="a"),
        SetTp(ask="a", tp=2, kv="migrate"),
        ReadStream(ask="a", operation="o", reader="r", stream="", after=0),
    ],
)
def test_other_requests_reach_a_worker(request_: WorkerRequest) -> None:
    assert read_request(over_the_wire(frame_header(request_))) == request_


@pytest.mark.parametrize(
    "reply",
    [
        Finished(operation="o", token=1, result={"sums": {"loss": 0.5}}, compute_s=1.0),
        Failed(
            operation="o",
            token=1,
            error=ConflictError("m").to_wire(),
            state_intact=False,
        ),
    ],
)
def test_replies_reach_a_router(reply: Reply) -> None:
    assert read_reply(over_the_wire(frame_header(reply))) == reply


def test_a_malformed_command_is_refused_with_the_place_of_the_fault() -> None:
    launch = LaunchWorkers(
        deployment="d",
        tenant="t",
        kind="train",
        incarnation=1,
        group="g",
        ranks=(RankPlacement(rank=0, node="n", gpu=0),),
        spec_json="{}",
    )
    params = over_the_wire({"command": launch})
    taken: list[LaunchWorkers] = []

    async def take(command: LaunchWorkers) -> None:
        taken.append(command)

    handle = on_command(as_type(LaunchWorkers), take)
    peer: Any = None
    asyncio.run(handle(peer, params))
    assert taken == [launch]
    params["command"]["ranks"][0]["gpu"] = "first"
    with pytest.raises(InvalidRequestError, match=r"ranks\[0\]\.gpu"):
        asyncio.run(handle(peer, params))
    with pytest.raises(InvalidRequestError, match="malformed command"):
        asyncio.run(handle(peer, {}))
    assert taken == [launch]


@pytest.mark.parametrize("plain", [None, [], {}, {"kind": "prune"}, {"kind": 3}])
def test_what_is_no_run_is_refused(plain: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        read_run(plain)
    with pytest.raises(msgspec.ValidationError):
        read_request({"request": plain})

"""A worker reads the scheduler's `RunOperation` as it is on the wire."""

import msgspec

from plexrl.ids import DeploymentId, FencingToken, GroupId, JobId, OperationId
from plexrl.scheduler.state.messages.commands import CODEC, RunOperation
from plexrl.wire.operations import AdamParams, OperationKind, params_to_json
from plexrl.worker.interface.command import RunCommand


def sent(kind: OperationKind, params_json: str = "{}") -> RunOperation:
    return RunOperation(
        operation=OperationId("o"),
        deployment=DeploymentId("j/actor"),
        job=JobId("j"),
        kind=kind,
        group=GroupId("g"),
        token=FencingToken(3),
        seq=7,
        replay=False,
        params_json=params_json,
        payload=None,
        addresses=("a", "b"),
    )


def test_a_command_with_default_fields_is_read() -> None:
    command = sent(OperationKind.OFFLOAD)
    received = msgspec.convert(CODEC.to_plain(command), RunCommand)
    for field in RunCommand.__struct_fields__:
        assert getattr(received, field) == getattr(command, field)
    assert received.name == ("o", 3)


def test_the_parameters_of_a_command_are_decoded() -> None:
    params = AdamParams(learning_rate=0.5)
    command = sent(OperationKind.OPTIM_STEP, params_to_json(params))
    received = msgspec.convert(CODEC.to_plain(command), RunCommand)
    assert received.params() == params

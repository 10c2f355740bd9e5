"""Operation parameters as JSON text, as the scheduler's journal holds them."""

import msgspec

from plexrl.wire.operations import (
    PARAMS_BY_KIND,
    AdamParams,
    BarrierParams,
    CheckpointParams,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    OperationKind,
    SyncWeightsParams,
    ZeroGradParams,
)

OperationParams = (
    ForwardParams
    | ForwardBackwardParams
    | AdamParams
    | ZeroGradParams
    | GenerateParams
    | CheckpointParams
    | SyncWeightsParams
    | BarrierParams
)


def params_to_json(params: OperationParams) -> str:
    """Encode the parameters of an operation."""
    return msgspec.json.encode(params).decode()


def params_from_json(kind: OperationKind, params_json: str) -> OperationParams:
    """Decode the parameters of an operation of `kind`, written by `params_to_json`."""
    params: OperationParams = msgspec.json.decode(params_json, type=PARAMS_BY_KIND[kind])
    return params

"""Inputs of the ranks and joined results: small and large, split and whole."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import tiny_qwen2
from plexrl.router.blobs.store import INLINE_BYTES_MAX
from plexrl.router.dispatch.run_parts import RunParts, join, join_samples, split
from plexrl.wire.operations import (
    ForwardBackwardParams,
    GenerateParams,
    LossSpec,
    OperationKind,
)
from plexrl.wire.tensors import Arrays, decode_body, encode_body
from tests.wire.runs import make_run


def command(ranks: int, kind: OperationKind = OperationKind.FORWARD_BACKWARD) -> Any:
    fields: dict[str, Any] = {}
    if kind is OperationKind.FORWARD_BACKWARD:
        params = ForwardBackwardParams(loss=LossSpec(name="cross_entropy"))
        fields = {"params": params, "payload": "p"}
    return make_run(kind, addresses=tuple(str(rank) for rank in range(ranks)), **fields)


def spec_of(dp: int) -> DeploymentSpec:
    return DeploymentSpec(
        model=tiny_qwen2("01"),
        kind="train",
        backend="fsdp",
        workers=dp,
        parallelism=Parallelism(dp=dp),
    )


def batch_of(rows: int) -> Arrays:
    lengths = np.arange(rows, dtype=np.int32) % 7 + 2
    tokens = int(lengths.sum())
    return {
        "tokens": np.arange(tokens, dtype=np.int32),
        "lengths": lengths,
        "mask": np.ones(tokens, dtype=np.float32),
    }


def split_now(dp: int, body: bytes) -> RunParts:
    return asyncio.run(split(command(dp), body, spec_of(dp)))


@pytest.mark.parametrize("rows", [5, 70_000])
@pytest.mark.parametrize("dp", [1, 3])
def test_every_row_reaches_one_rank_and_returns_to_its_position(rows: int, dp: int) -> None:
    batch = batch_of(rows)
    body = encode_body({"of": "no interest"}, batch)
    assert (len(body) > INLINE_BYTES_MAX) == (rows > 5)
    parts = split_now(dp, body)
    assert parts.plan is not None
    sent = [decode_body(b"".join(payload))[1] for payload in parts.payloads]
    assert sum(len(each["lengths"]) for each in sent) == rows
    assert parts.share.denominator == float(batch["lengths"].sum() - rows)
    answers = [
        bytearray(encode_body({}, {"logprobs": each["tokens"].astype(np.float32)})) for each in sent
    ]
    joined = decode_body(b"".join(asyncio.run(join(parts.plan, answers))))[1]
    np.testing.assert_array_equal(joined["logprobs"], batch["tokens"].astype(np.float32))


def test_an_unsplit_batch_is_sent_byte_for_byte() -> None:
    body = encode_body({}, batch_of(9))
    assert [list(payload) for payload in split_now(1, body).payloads] == [[body]]
    assert split_now(1, body).payloads[0][0] is body


def test_a_rank_that_omits_tokens_is_detected() -> None:
    parts = split_now(1, encode_body({}, batch_of(9)))
    assert parts.plan is not None
    short = bytearray(encode_body({}, {"logprobs": np.zeros(3, dtype=np.float32)}))
    with pytest.raises(AssertionError, match="of some rows only"):
        asyncio.run(join(parts.plan, [short]))


def test_a_payload_without_rows_goes_to_every_rank() -> None:
    barrier = command(2, OperationKind.BARRIER)
    assert asyncio.run(split(barrier, None, None)).payloads == [(), ()]
    step = command(2, OperationKind.OPTIM_STEP)
    assert asyncio.run(split(step, b"abc", None)).payloads == [(b"abc",), (b"abc",)]


def test_prompts_go_to_replica_leaders_and_samples_keep_the_order() -> None:
    spec = DeploymentSpec(
        model=tiny_qwen2("01"),
        kind="rollout",
        backend="torch",
        workers=4,
        parallelism=Parallelism(dp=2, tp=2),
    )
    prompts = {name: array for name, array in batch_of(5).items() if name != "mask"}
    body = encode_body({}, prompts)
    generate = structs.replace(command(4, OperationKind.GENERATE), params=GenerateParams())
    parts = asyncio.run(split(generate, body, spec))
    assert parts.generation is not None
    assert [share.rank for share in parts.generation.shares] == [0, 2]
    sent = [bytearray(b"".join(payload)) for payload in parts.payloads]
    joined = decode_body(b"".join(join_samples(parts.generation, sent)))[1]
    assert {name: joined[name].tolist() for name in prompts} == {
        name: array.tolist() for name, array in prompts.items()
    }
    alone = replace(spec, workers=2, parallelism=Parallelism(tp=2))
    assert asyncio.run(split(generate, body, alone)).payloads == [(body,)], "as it came"

"""PlexRL's messages, against those of the SDK's own generated module."""

from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.proto import request_conv, response_conv, tinker_public_pb2

from plexrl.errors import InvalidRequestError
from plexrl.router.tinker.messages.codec import (
    LENGTH,
    STOP,
    SampledRow,
    TopRows,
    read_train_batch,
    sample_output,
    train_output,
)
from plexrl.router.tinker.messages.fields import FIELDS_MAX
from plexrl.router.tinker.messages.requests import (
    AsampleRequest,
    CreateModel,
    LoadWeights,
    OptimStepRequest,
)

INPUTS: dict[str, Any] = {"target_tokens": [4, 5, 6], "weights": [0.0, 1.0, -0.5]}
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([3, 4]).append_int(5),
    loss_fn_inputs=INPUTS,
)


def encoded(**fields: object) -> tinker_public_pb2.ForwardBackwardRequest:
    batch = types.ForwardBackwardInput(data=[DATUM], loss_fn="ppo", loss_fn_config={"beta": 0.5})
    request = types.ForwardBackwardRequest(forward_backward_input=batch, model_id="m", seq_id=7)
    message = request_conv.forward_backward_request_to_proto(request)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def test_a_batch_of_the_sdk_is_read_as_it_was_meant() -> None:
    batch = read_train_batch(encoded(forward_only=True).SerializeToString())
    assert (batch.model_id, batch.seq_id, batch.loss) == ("m", 7, "ppo")
    assert batch.settings == {"beta": 0.5}
    assert batch.forward_only
    [row] = batch.data
    assert row.tokens.tolist() == [3, 4, 5]
    assert row.inputs["target_tokens"].tolist() == [4, 5, 6]
    assert row.inputs["weights"].tolist() == [0.0, 1.0, -0.5]


def test_the_sdk_reads_the_logprobs_of_each_row() -> None:
    rows = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    found = response_conv.deserialize_forward_backward_output(train_output(rows, {"loss:sum": 2}))
    assert found.metrics == {"loss:sum": 2.0}
    assert [each["logprobs"].to_numpy().tolist() for each in found.loss_fn_outputs] == [
        [-1.0, -2.0],
        [-3.0],
    ]


def test_the_sdk_reads_samples_and_the_logprobs_of_prompts() -> None:
    top = TopRows(ids=np.array([[-1, -1], [5, 6]]), logprobs=np.array([[0, 0], [-0.1, -2.0]]))
    row = SampledRow(
        stop_reason=LENGTH, tokens=np.array([8, 9]), logprobs=np.array([-1.0, -2.0]), top=top
    )
    empty = SampledRow(stop_reason=STOP, tokens=np.array([2]), logprobs=np.array([-1]), top=None)
    body = sample_output([row, empty], np.array([np.nan, -0.5]), top)
    found = response_conv.deserialize_sample_response(body)
    assert [each.stop_reason for each in found.sequences] == ["length", "stop"]
    assert list(found.sequences[0].tokens) == [8, 9]
    assert found.sequences[0].topk_logprobs is not None
    assert found.prompt_logprobs == [None, -0.5]
    assert found.topk_prompt_logprobs is not None
    assert found.topk_prompt_logprobs[1] == [(5, pytest.approx(-0.1)), (6, -2.0)]


def test_fields_that_plexrl_does_not_know_are_refused_where_they_ask_for_something() -> None:
    unknown = encoded().SerializeToString() + b"\xf8\x07\x01"
    batch = read_train_batch(unknown)
    assert "field 127" in str(batch.error)
    assert (batch.model_id, batch.seq_id, batch.data) == ("m", 7, ())
    known = b'{"session_id": "s", "model_seq_id": 0, "base_model": "b", "news": %s}'
    assert CreateModel.read(known % b"null").base_model == "b"
    assert CreateModel.read(known % b"[]").base_model == "b"
    with pytest.raises(InvalidRequestError, match="news='x'"):
        CreateModel.read(known % b'"x"')
    inner = b'{"model_id": "m", "seq_id": 1, "adam_params": {"nesterov": true}}'
    with pytest.raises(InvalidRequestError, match=r"adam_params\.nesterov"):
        OptimStepRequest.read(inner)
    with pytest.raises(InvalidRequestError, match="weights_access_token"):
        LoadWeights.read(b'{"path": "p", "weights_access_token": "t"}')


def test_samples_that_plexrl_cannot_draw_are_refused_by_name() -> None:
    prompt = b'{"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, %s}'
    for field in (b'"prompt_alt_tokens_k": 2', b'"target_prompt_logprobs": {"data": [1]}'):
        with pytest.raises(InvalidRequestError, match=field.decode().split('"')[1]):
            AsampleRequest.read(prompt % field)
    with pytest.raises(InvalidRequestError, match='loss_fn="importance_sampling"'):
        AsampleRequest.read(prompt % b'"record_stability_info": true')
    with pytest.raises(InvalidRequestError, match="num_samples"):
        AsampleRequest.read(prompt % b'"num_samples": 65537')


@pytest.mark.parametrize("field", [b"\x1a\x00", b"\x2a\x00", b"\xf8\x07\x01"])
def test_a_body_of_more_fields_than_a_batch_has_is_refused_before_it_is_parsed(
    field: bytes,
) -> None:
    with pytest.raises(InvalidRequestError, match="fields"):
        read_train_batch(field * (FIELDS_MAX + 1))
    size = len(field) * FIELDS_MAX
    row = (
        b"\x1a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + field * FIELDS_MAX
    )
    with pytest.raises(InvalidRequestError, match="fields"):
        read_train_batch(row)


def test_a_long_shape_is_refused_before_it_is_parsed() -> None:
    message = encoded()
    message.data[0].loss_fn_inputs["weights"].shape.extend([0] * 100)
    with pytest.raises(InvalidRequestError, match="shape has 101 bytes"):
        read_train_batch(message.SerializeToString())


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no ForwardBackwardRequest"):
        read_train_batch(b"\xff\xff")
    with pytest.raises(InvalidRequestError, match="session_id"):
        CreateModel.read(b"{}")

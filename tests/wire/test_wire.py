"""Messages, frames and bodies come out as they went in; hostile ones are refused."""

import asyncio
import socket
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from plexrl import errors
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.codec import Codec
from plexrl.wire.framing import recv_frame, send_frame
from plexrl.wire.parameter_checks import differing_settings
from plexrl.wire.rpc import Handler, Peer
from plexrl.wire.tensors import decode_body, encode_body, with_params

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(
    st.dictionaries(st.text(max_size=8), json_values, max_size=4),
    st.dictionaries(
        st.text("abc", min_size=1, max_size=4),
        hnp.arrays(st.sampled_from([np.float32, np.int32, np.uint8]), hnp.array_shapes(min_dims=0)),
        max_size=3,
    ),
)
def test_a_body_comes_back_as_it_was(params: dict[str, object], arrays: dict[str, object]) -> None:
    got_params, got = decode_body(encode_body(params, arrays))
    assert got_params == params
    assert sorted(got) == sorted(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype  # type: ignore[attr-defined]
        assert got[name].shape == array.shape  # type: ignore[attr-defined]
        assert got[name].tobytes() == array.tobytes()  # type: ignore[attr-defined]


def test_other_writers_files_are_read_and_other_readers_read_ours() -> None:
    arrays = {"a": np.arange(5, dtype=np.int16), "b": np.ones((2, 3)), "c": np.zeros(0, np.uint8)}
    for name, array in decode_body(save(arrays, metadata={"plexrl": '{"x":1}'}))[1].items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    for name, array in load(encode_body({"x": 1}, arrays)).items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)


def test_arrays_are_views_of_their_body() -> None:
    body = bytearray(encode_body({}, {"x": np.arange(4, dtype=np.int32)}))
    decode_body(body)[1]["x"][2] = 7
    assert decode_body(body)[1]["x"].tolist() == [0, 1, 7, 3]


def test_a_body_gets_other_parameters_and_keeps_its_arrays() -> None:
    body = encode_body({"old": 1}, {"x": np.arange(4, dtype=np.int32)})
    params, arrays = decode_body(b"".join(with_params(body, {"new": 2})))
    assert params == {"new": 2}
    assert arrays["x"].tolist() == [0, 1, 2, 3]


@given(st.binary(max_size=200))
def test_garbage_is_no_body(body: bytes) -> None:
    with pytest.raises(errors.InvalidRequestError):
        decode_body(body)


@given(st.binary(max_size=64), st.integers(0, 60))
def test_a_body_cut_short_is_refused(tail: bytes, cut: int) -> None:
    whole = encode_body({"a": 1}, {"x": np.arange(50, dtype=np.int32)})
    with pytest.raises(errors.InvalidRequestError):
        decode_body(whole[: len(whole) - 1 - cut] + tail[:0])


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.binary(max_size=5000))
def test_a_frame_comes_back_as_it_was(header: dict[str, object], payload: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, header, payload)
        got_header, got_payload = recv_frame(right)
    assert (got_header, bytes(got_payload)) == (header, payload)


def test_a_frame_that_claims_too_much_is_refused_before_memory_is_taken() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack("<IQ", 2**32 - 1, 2**63))
        with pytest.raises(errors.PayloadTooLargeError, match="split the batch"):
            recv_frame(right)


def test_a_peer_that_leaves_in_the_middle_of_a_frame_is_noticed() -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(struct.pack("<IQ", 100, 0) + b"x" * 10)
        left.close()
        with pytest.raises(errors.ConnectionLostError):
            recv_frame(right)


class Spoken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    word: str


def test_messages_are_tagged_and_strange_ones_refused() -> None:
    codec: Codec[Spoken] = Codec(Spoken)
    assert codec.decode(codec.encode(Spoken(word="hi"))) == Spoken(word="hi")
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Sung'"):
        codec.decode(b'{"type": "Sung"}')
    with pytest.raises(msgspec.ValidationError):
        codec.decode(b'{"type": "Spoken", "word": 3}')


def test_every_kind_of_event_survives_the_journals_encoding() -> None:
    event = ev.NodeJoined(
        node="n",
        gpus=1,
        gpu_memory_bytes=2,
        host_memory_bytes=3,
        statemanager="s",
        workers=(ev.WorkerSeen(deployment="d", rank=0, incarnation=1, address="a"),),
    )
    assert ev.CODEC.decode(ev.CODEC.encode(event)) == event
    for one in (event, ev.TimerFired(), ev.OperationFinished(operation="o", token=1, compute_s=0)):
        assert ev.CODEC.encode(one) == msgspec.json.encode(one)


def test_errors_keep_their_kind_and_details_over_the_wire() -> None:
    error = errors.from_wire(errors.StaleTokenError("old", token=1).to_wire())
    assert isinstance(error, errors.StaleTokenError)
    assert (error.message, error.details, error.status) == ("old", {"token": 1}, 409)
    assert type(errors.from_wire({"code": "new_in_a_later_version"})) is errors.PlexRLError


async def _conversation(
    handlers: dict[str, Handler],
) -> tuple[Peer, Peer, list[asyncio.Task[None]]]:
    left, right = socket.socketpair()
    ends = [await asyncio.open_connection(sock=sock) for sock in (left, right)]
    peers = [Peer(*end, handlers) for end in ends]
    return peers[0], peers[1], [asyncio.create_task(peer.run()) for peer in peers]


def test_calls_are_answered_errors_pass_over_and_a_lost_peer_is_noticed() -> None:
    async def double(_: Peer, params: dict[str, Any]) -> dict[str, Any]:
        return {"value": 2 * params["value"]}

    async def refuse(_: Peer, params: dict[str, Any]) -> None:
        raise errors.CapacityError("full", **params)

    async def hang(_: Peer, __: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async def talk() -> None:
        one, other, tasks = await _conversation({"double": double, "refuse": refuse, "hang": hang})
        answers = await asyncio.gather(*(one.call("double", {"value": i}) for i in range(50)))
        assert [answer["value"] for answer in answers] == [2 * i for i in range(50)]
        with pytest.raises(errors.CapacityError) as refused:
            await other.call("refuse", {"gpus": 3})
        assert refused.value.details == {"gpus": 3}
        with pytest.raises(errors.InvalidRequestError, match="unknown method"):
            await one.call("dance")
        with pytest.raises(errors.NoAnswerError):
            await one.call("hang", timeout_s=0.01)
        waiting = asyncio.create_task(one.call("hang"))
        await asyncio.sleep(0)
        other.close()
        with pytest.raises(errors.ConnectionLostError):
            await waiting
        await asyncio.gather(*tasks)

    asyncio.run(talk())


def test_settings_that_differ_are_named_with_both_values() -> None:
    known = {"workers": 2, "model": {"layers": 2, "vocabulary": "a" * 900}, "lora": None}
    asked = {"workers": 2, "model": {"layers": 4, "vocabulary": "b"}, "lora": {"rank": 8}}
    said = differing_settings(known, asked)
    assert said.startswith("model.layers (2, not 4), model.vocabulary (")
    assert said.endswith("'b'), lora (none, not {'rank': 8})")
    assert len(said) < 200

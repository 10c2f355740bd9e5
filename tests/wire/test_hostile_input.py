"""Whatever arrives, it ends in a typed error or a closed connection, soon and in bounded memory."""

import asyncio
import json
import socket
import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plexrl import errors
from plexrl.wire.framing import (
    HEADER_BYTES_MAX,
    UNSEEN_BYTES_MAX,
    encode_head,
    read_frame,
    recv_frame,
    send_frame,
    write_frame,
)
from plexrl.wire.rpc import Peer
from plexrl.wire.tensors import decode_body, encode_body

DEADLINE_S = 60.0
LENGTHS = struct.Struct("<IQ")

DEEP_MSGPACK = b"\x81\xa1a" + b"\x91" * 50_000 + b"\xc0"
BAD_TEXT_MSGPACK = b"\x81\xa1a\xa1\xff"

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
headers = st.dictionaries(
    st.sampled_from(["call", "method", "params", "answer", "result", "error", "x"]),
    values | st.sampled_from(["echo", 1]),
    max_size=5,
)


def frame(body: bytes) -> bytes:
    return LENGTHS.pack(len(body), 0) + body


def within_deadline(talk: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await talk()

    asyncio.run(bounded())


@given(st.binary(max_size=300) | values.map(msgspec.msgpack.encode))
@example(DEEP_MSGPACK)
@example(BAD_TEXT_MSGPACK)
@example(b"\x81\x01\x02")
@example(b"\x81\xa1a\xdf\xff\xff\xff\xff")
def test_any_header_is_a_map_or_a_typed_error_on_a_blocking_socket(body: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(frame(body))
        left.shutdown(socket.SHUT_WR)
        try:
            header, payload = recv_frame(right)
        except errors.PlexRLError:
            return
        assert isinstance(header, dict)
        assert payload == b""


@given(st.binary(max_size=300) | headers.map(lambda header: frame(msgspec.msgpack.encode(header))))
@example(frame(DEEP_MSGPACK))
@example(frame(BAD_TEXT_MSGPACK))
@example(LENGTHS.pack(2**32 - 1, 0))
@example(LENGTHS.pack(2, 2**63) + b"\x80")
def test_any_bytes_are_frames_or_a_typed_error_on_a_stream(stream: bytes) -> None:
    async def talk() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(stream)
        reader.feed_eof()
        try:
            while True:
                header, _ = await read_frame(reader)
                assert isinstance(header, dict)
        except errors.PlexRLError:
            return

    within_deadline(talk)


def test_a_stream_stays_in_step_after_a_malformed_header() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(LENGTHS.pack(len(BAD_TEXT_MSGPACK), 3) + BAD_TEXT_MSGPACK + b"abc")
        left.sendall(encode_head({"a": 1}, 0))
        with pytest.raises(errors.InvalidRequestError, match="header is malformed"):
            recv_frame(right)
        assert recv_frame(right)[0] == {"a": 1}


def test_a_length_alone_takes_no_memory() -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(LENGTHS.pack(1, 15 << 30) + b"\x80")
        left.close()
        tracemalloc.start()
        try:
            with pytest.raises(errors.ConnectionLostError):
                recv_frame(right)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 1 << 30


def test_a_payload_larger_than_the_first_buffer_arrives_whole() -> None:
    payload = np.arange(UNSEEN_BYTES_MAX // 4 + 100, dtype=np.int32).tobytes()
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as other_side:
        sending = other_side.submit(send_frame, left, {"a": 1}, payload)
        header, got = recv_frame(right)
        sending.result()
    assert header == {"a": 1}
    assert got == payload


async def _served() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Task[None]]:
    """A raw end, and the task of the `Peer` at the other."""

    async def echo(_: Peer, params: dict[str, Any]) -> dict[str, Any]:
        return params

    async def flood(_: Peer, __: dict[str, Any]) -> dict[str, Any]:
        return {"text": b"x" * HEADER_BYTES_MAX}

    left, right = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=left)
    peer = Peer(*await asyncio.open_connection(sock=right), {"echo": echo, "flood": flood})
    return reader, writer, asyncio.create_task(peer.run())


@given(st.lists(headers, max_size=4), st.binary(max_size=40))
@example([{"call": 1, "method": "echo"}], b"")
@example([{"call": 1, "method": []}], b"")
@example([{"call": 1, "method": "echo", "params": 3}], b"")
@example([{"call": [], "method": "echo", "params": {}}], b"")
@example([{"answer": []}], b"")
@example([{"answer": 1, "error": 3}], b"")
@example([{}], LENGTHS.pack(2**32 - 1, 0))
@example([], frame(DEEP_MSGPACK))
@example([], frame(BAD_TEXT_MSGPACK))
def test_a_peer_survives_any_frames_and_ends_when_they_do(
    said: list[dict[str, Any]], tail: bytes
) -> None:
    async def talk() -> None:
        reader, writer, running = await _served()
        writer.write(b"".join(frame(msgspec.msgpack.encode(header)) for header in said) + tail)
        writer.write_eof()
        await running
        answers = await reader.read()
        writer.close()
        assert len(answers) < 1 << 20

    within_deadline(talk)


def test_a_malformed_call_is_answered_and_the_next_one_served() -> None:
    async def talk() -> None:
        reader, writer, running = await _served()
        for said, code in (
            ({"call": 1, "method": "echo"}, "invalid_request"),
            ({"call": 2, "method": "echo", "params": [1]}, "invalid_request"),
            ({"call": 3, "method": {}, "params": {}}, "invalid_request"),
            ({"call": 4, "method": "flood", "params": {}}, "payload_too_large"),
        ):
            await write_frame(writer, said)
            answer, _ = await read_frame(reader)
            assert (answer["answer"], answer["error"]["code"]) == (said["call"], code)
        await write_frame(writer, {"call": 5, "method": "echo", "params": {"a": 1}})
        assert (await read_frame(reader))[0] == {"answer": 5, "result": {"a": 1}}
        writer.close()
        await running

    within_deadline(talk)


@pytest.mark.parametrize(
    "strange",
    [
        encode_head({"answer": 1, "result": 3}, 0),
        encode_head({"answer": 1, "error": "no"}, 0),
        encode_head({"answer": {}, "result": {}}, 0),
        encode_head({"neither": 1}, 0),
        encode_head({"answer": 1, "result": {}}, 5) + b"bytes",
        frame(DEEP_MSGPACK),
    ],
    ids=["result", "error", "number", "neither", "payload", "deep"],
)
def test_a_call_whose_answer_is_malformed_ends_with_the_connection(strange: bytes) -> None:
    async def talk() -> None:
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=left)
        peer = Peer(*await asyncio.open_connection(sock=right), {})
        running = asyncio.create_task(peer.run())
        calling = asyncio.create_task(peer.call("anything"))
        await read_frame(reader)
        writer.write(strange)
        with pytest.raises(errors.ConnectionLostError):
            await calling
        with pytest.raises(errors.ConnectionLostError):
            await peer.notify("anything")
        await running
        writer.close()

    within_deadline(talk)


def body_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


tensor_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "I64", "BOOL", "C64", "X"]) | values,
        "shape": st.lists(st.integers(-1, 2**64), max_size=4) | values,
        "data_offsets": st.lists(st.integers(0, 2**64), max_size=3) | values,
    }
)


@given(
    st.dictionaries(
        st.sampled_from(["__metadata__", "a", "b"]),
        values | tensor_entries | st.dictionaries(st.just("plexrl"), values, max_size=1),
        max_size=3,
    ).map(lambda header: json.dumps(header, default=str)),
    st.binary(max_size=16),
)
@example('{"__metadata__":{"plexrl":5}}', b"")
@example('{"__metadata__":["plexrl"]}', b"")
@example('{"__metadata__":{"plexrl":"' + "[" * 50_000 + '"}}', b"")
@example('{"a":' + "[" * 50_000, b"")
@example('{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}', b"xx")
@example('{"a":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}', b"")
@example('{"a":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}', b"")
@example('{"a":{"dtype":"F32","shape":' + str([1] * 80) + ',"data_offsets":[0,4]}}', b"xxxx")
def test_any_body_is_decoded_or_refused(header: str, data: bytes) -> None:
    try:
        params, arrays = decode_body(body_of(header.encode(), data))
    except errors.InvalidRequestError:
        return
    assert isinstance(params, dict)
    assert sum(array.nbytes for array in arrays.values()) <= len(data)


@given(st.data())
def test_a_body_with_a_few_bytes_changed_is_decoded_or_refused(data: st.DataObject) -> None:
    body = bytearray(encode_body({"a": [1, "two"]}, {"x": np.arange(6, dtype=np.int32)}))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_body(body)
    except errors.InvalidRequestError:
        return


@given(values)
@example({"code": [], "message": None, "details": {"a": 1}})
def test_any_value_on_the_wire_becomes_an_error(value: object) -> None:
    assert isinstance(errors.from_wire(value), errors.PlexRLError)

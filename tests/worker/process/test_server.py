"""A worker's socket outlives whatever is sent to it."""

import socket
import struct
from pathlib import Path

import pytest

from plexrl.wire.framing import send_frame
from plexrl.worker.process.server import Server

LENGTHS = struct.Struct("<IQ")


@pytest.mark.parametrize(
    "hostile",
    [
        LENGTHS.pack(2**32 - 1, 0),
        LENGTHS.pack(5, 0) + b"\x81\xa1a\xa1\xff",
        LENGTHS.pack(50_004, 0) + b"\x81\xa1a" + b"\x91" * 50_000 + b"\xc0",
        LENGTHS.pack(1, 0) + b"\xc0",
    ],
    ids=["too-long", "bad-text", "deep", "no-map"],
)
def test_a_malformed_frame_ends_its_own_connection_only(tmp_path: Path, hostile: bytes) -> None:
    address = str(tmp_path / "w.sock")
    server = Server(address)
    with socket.socket(socket.AF_UNIX) as bad, socket.socket(socket.AF_UNIX) as good:
        for sock in (bad, good):
            sock.settimeout(20.0)
            sock.connect(address)
        bad.sendall(hostile)
        assert bad.recv(1) == b""
        send_frame(good, {"request": "run"}, b"payload")
        request = server.requests.get(timeout=60.0)
        assert (request.header, bytes(request.payload)) == ({"request": "run"}, b"payload")

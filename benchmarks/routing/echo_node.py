"""A node whose workers answer at once, to measure only the router and the scheduler.

    python -m benchmarks.routing.echo_node SCHEDULER_SOCKET FOLDER GPUS

Speaks as a node agent and as its workers, over the sockets that real ones use. A worker takes its
whole frame in, touches each page of the payload, counts the tokens and answers with that many
logprobs.
"""

import asyncio
import functools
import json
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from plexrl.errors import PlexRLError
from plexrl.wire.framing import recv_frame_or_file, send_frame
from plexrl.wire.rpc import Handler, Peer
from plexrl.wire.tensors import encode_body
from plexrl.worker.process.server.server import StagedPayload

Plain = dict[str, Any]
HEADER_LENGTH = struct.Struct("<Q")
PAGE_BYTES = 4096


def tokens_of(payload: bytearray | memoryview) -> int:
    """Of a batch, by the header of its safetensors file."""
    (length,) = HEADER_LENGTH.unpack_from(payload)
    header = json.loads(bytes(payload[HEADER_LENGTH.size : HEADER_LENGTH.size + length]))
    return int(header["tokens"]["shape"][0])


@functools.lru_cache
def logprobs(tokens: int) -> bytes:
    """The answer to a batch."""
    return encode_body({}, {"logprobs": np.full(tokens, -1.0, dtype=np.float32)})


def serve(listening: socket.socket) -> None:
    """Be a worker."""
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    """Answer one router until it leaves."""
    try:
        staged = StagedPayload()
        while True:
            header, received = recv_frame_or_file(connection)
            payload = staged.payload_of(header, received)
            if payload is None:
                continue
            # A payload that is passed as a file is in memory only once it is read.
            np.frombuffer(payload, dtype=np.uint8)[::PAGE_BYTES].max(initial=0)
            command = header["run"]
            reply = {
                "reply": "finished",
                "operation": command["operation"],
                "token": command["token"],
                "result": {"sums": {"tokens": 1.0, "loss": 0.0}},
                "compute_s": 0.0,
            }
            send_frame(connection, reply, logprobs(tokens_of(payload)) if payload else b"")
    except (PlexRLError, OSError):
        connection.close()


class EchoNode:
    """One node agent with all its workers in this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: set[asyncio.Task[None]] = set()

    async def run(self, scheduler: str, gpus: int) -> None:
        """Serve until the scheduler is gone."""
        quiet = ("stop", "release_state", "prefetch_state")
        handlers: dict[str, Handler] = {"launch": self._launch, **dict.fromkeys(quiet, _nothing)}
        peer = Peer(*await asyncio.open_unix_connection(scheduler), handlers)
        running = asyncio.create_task(peer.run())
        hello = {
            "role": "agent",
            "node": "echo",
            "gpus": gpus,
            "gpu_memory_bytes": 1 << 40,
            "host_memory_bytes": 1 << 40,
            "statemanager": "none",
        }
        await peer.call("hello", hello)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await running

    async def _launch(self, peer: Peer, params: Plain) -> Plain:
        command = params["command"]
        for rank in command["ranks"]:
            path = self._folder / f"{abs(hash(command['deployment']))}.{rank['rank']}"
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(str(path))
            listening.listen(16)
            threading.Thread(target=serve, args=(listening,), daemon=True).start()
            ready = {
                "deployment": command["deployment"],
                "rank": rank["rank"],
                "incarnation": command["incarnation"],
                "address": f"unix:{path}",
            }
            told = asyncio.create_task(self._tell(peer, ready))
            self._told.add(told)
            told.add_done_callback(self._told.discard)
        return {}

    async def _tell(self, peer: Peer, ready: Plain) -> None:
        await peer.call("worker_ready", ready)


async def _nothing(_: Peer, __: Plain) -> Plain:
    return {}


if __name__ == "__main__":
    asyncio.run(EchoNode(Path(sys.argv[2])).run(sys.argv[1], int(sys.argv[3])))

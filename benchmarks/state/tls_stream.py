"""Bytes over `ssl.SSLSocket` between two processes: the bound of what Python sends by TLS here.

    python -m benchmarks.state.tls_stream send HOST PORT STREAMS BYTES CA CERTIFICATE KEY
    python -m benchmarks.state.tls_stream receive HOST PORT STREAMS BYTES CA CERTIFICATE KEY

The sender sends `BYTES` from memory, an equal part on each stream; the receiver receives into
memory. Both print JSON in the end: seconds from the first byte to the last one, and CPU seconds.
"""

import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable

from plexrl.wire.links.credentials import Credentials, TlsFiles

CALL_BYTES = 4 << 20


def send(host: str, port: int, context: ssl.SSLContext, streams: int, nbytes: int) -> None:
    """Serve one receiver."""
    memory = memoryview(bytes(nbytes))

    def serve(index: int) -> None:
        secure = context.wrap_socket(accepted[index], server_side=True)
        ready.wait()
        for start in range(0, nbytes, CALL_BYTES):
            secure.sendall(memory[start : start + CALL_BYTES])
        secure.recv(1)

    with socket.create_server((host, port)) as listening:
        _say("listening")
        accepted = [listening.accept()[0] for _ in range(streams)]
    ready = threading.Barrier(streams)
    _report(serve, streams)


def receive(host: str, port: int, context: ssl.SSLContext, streams: int, nbytes: int) -> None:
    """Receive from a sender."""
    memory = [memoryview(bytearray(nbytes)) for _ in range(streams)]
    raw = [socket.create_connection((host, port)) for _ in range(streams)]

    def take(index: int) -> None:
        secure = context.wrap_socket(raw[index])
        filled = 0
        while filled < nbytes:
            count = secure.recv_into(memory[index][filled:])
            assert count, "the sender has ended"
            filled += count
        secure.close()

    _report(take, streams)


def _report(work: Callable[[int], None], streams: int) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(streams)]
    cpu_s, began = time.process_time(), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu_s}
    _say("done " + json.dumps(took))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(side: str, host: str, port: str, streams: str, nbytes: str, *files: str) -> None:
    """Run one side."""
    ca, certificate, key = files
    credentials = Credentials(TlsFiles(ca=ca, certificate=certificate, key=key))
    size = int(nbytes) // int(streams)
    if side == "send":
        send(host, int(port), credentials.server_context(), int(streams), size)
    else:
        receive(host, int(port), credentials.client_context(), int(streams), size)


if __name__ == "__main__":
    main(*sys.argv[1:])

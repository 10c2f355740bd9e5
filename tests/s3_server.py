"""A real S3 server: rclone's, over a folder, which keeps its objects when it is killed.

It checks signatures and speaks multipart uploads. It ignores `If-None-Match`, and a killed server
leaves parts of unfinished uploads as hidden folders.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.free_ports import free_port
from tests.rclone import rclone

KEY, SECRET = "AKIAPLEXRLTESTS00001", "secret-of-plexrl-tests"
BUCKET = "plexrl"
START_S = 30.0


class S3Server:
    """The server process of one folder; it may be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / BUCKET).mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """What a client's process needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            # This server returns the checksum of a replaced object's first contents.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }

    def files(self, prefix: str = "") -> list[str]:
        """The objects in the bucket, as the server keeps them."""
        root = self.folder / BUCKET
        found = [path for path in (root / prefix).rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(root)) for path in found)

    def start(self, *, secret: str = SECRET) -> None:
        command = [str(rclone()), "serve", "s3", "--config", os.devnull]
        command += ["--addr", f"127.0.0.1:{self.port}", "--log-level", "ERROR"]
        environment = {**os.environ, "RCLONE_AUTH_KEY": f'"{KEY},{secret}"'}
        self._process = subprocess.Popen([*command, str(self.folder)], env=environment)
        wait_for_port(self._process, self.port)

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """Let requests hang: they are accepted and not answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A running server over `folder`."""
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def wait_for_port(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Wait until the process listens."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the S3 server has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("the S3 server does not listen")

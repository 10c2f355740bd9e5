"""An S3 server with conditional writes (`If-None-Match`); its objects end with its process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.free_ports import free_port
from tests.s3_server import BUCKET, KEY, SECRET, wait_for_port


@contextmanager
def moto_server() -> Iterator[dict[str, str]]:
    """A running server with the bucket `BUCKET`; yields the environment of its clients."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ}
    ) as process:
        try:
            wait_for_port(process, port)
            httpx.put(f"{endpoint}/{BUCKET}").raise_for_status()
            yield {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        finally:
            process.kill()

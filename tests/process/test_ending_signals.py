"""A closed terminal ends a process in order, unless it is to outlive its terminal."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = """
from plexrl.process.children.startup import run_until_signal
async def serve(stop):
    print("ready", flush=True)
    await stop.wait()
    print("ended in order", flush=True)
run_until_signal(serve, ends_with_parent=False)
"""
SUPERVISOR = """
from plexrl.process.children.supervision import run_until_end
async def supervise(stop, ready):
    ready(None)
    await stop.wait()
    print("ended in order", flush=True)
run_until_end(supervise, lambda _: print("ready", flush=True))
"""


@pytest.mark.parametrize("under", [(), ("nohup",)], ids=["terminal", "nohup"])
@pytest.mark.parametrize("script", [SERVICE, SUPERVISOR], ids=["service", "supervisor"])
def test_hang_up_is_as_sigterm_and_ignored_under_nohup(script: str, under: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [*under, sys.executable, "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if under:
                status = Path(f"/proc/{process.pid}/status").read_text()
                ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
                assert ignored & 1 << (signal.SIGHUP - 1)
                process.send_signal(signal.SIGTERM)
            else:
                process.send_signal(signal.SIGHUP)
            assert process.stdout.read() == "ended in order\n"
            assert process.wait(60) == 0
        finally:
            process.kill()

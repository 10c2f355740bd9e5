"""A real scheduler process for the tests, and a router's connection to it."""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from plexrl.wire.rpc import Peer
from tests.warm_start import start_part

WAIT_S = 60.0


class SchedulerProcess:
    """`python -m plexrl.scheduler`, from its start to its end."""

    def __init__(self, folder: Path, name: str, journal: str, **changes: object) -> None:
        self.name = name
        self.listen = str(changes.pop("listen", folder / f"{name}.sock"))
        config = {
            "listen": [f"unix:{self.listen}"],
            "journal": journal,
            "operator_key_digest": "0",
            "holder": name,
            "lease_s": 2.0,
            **changes,
        }
        self._config = folder / f"{name}.json"
        self._config.write_text(json.dumps(config))
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = start_part(
                "plexrl.scheduler",
                ("--config", str(self._config)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text()

    def wait_ready(self) -> None:
        """Return when it leads; fails with its log if it ends before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert b'"ready"' in line, self.log

    async def wait_log(self, text: str) -> None:
        """Return when it has said `text`."""
        async with asyncio.timeout(WAIT_S):
            while text not in self.log:
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.02)

    def send(self, sig: signal.Signals) -> None:
        """Give it a signal."""
        self.process.send_signal(sig)

    def wait_end(self) -> int:
        """Its exit status."""
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @asynccontextmanager
    async def connected(self, router: str = "r") -> AsyncIterator[Peer]:
        """A router's connection; a former one of the same router ends."""
        peer = Peer(*await asyncio.open_unix_connection(self.listen), {})
        running = asyncio.create_task(peer.run())
        try:
            await peer.call("hello", {"role": "router", "router": router})
            yield peer
        finally:
            peer.close()
            await asyncio.gather(running, return_exceptions=True)

    async def submit_job(self, job: str) -> None:
        """Have a job accepted."""
        async with self.connected() as peer:
            await peer.call("submit_job", job_params(job))

    async def jobs(self) -> list[str]:
        """Every job it knows."""
        async with self.connected() as peer:
            answer = await peer.call("list_jobs", {"tenant": None, "as_operator": True})
            return [view["job"] for view in answer["jobs"]]


def job_params(job: str, **changes: object) -> dict[str, Any]:
    """A call of `submit_job`."""
    return {
        "job": job,
        "tenant": "operator",
        "name": job,
        "controller_timeout_s": 1e6,
        "reattach_timeout_s": 1e6,
        **changes,
    }

"""A node that is cut off from the scheduler ends its workers, and says so when it comes back."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from plexrl import errors
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.dial import Link, Server, serve
from plexrl.wire.rpc import Peer
from plexrl.worker.agent.agent import Agent
from plexrl.worker.interface.config import AgentConfig
from plexrl.worker.process.node_lease import EXIT_LEASE_OVER, NodeLease, clock
from tests.certificates import TestAuthority
from tests.scheduler.live_service import until
from tests.statemanager.conftest import DEADLINE_S, Daemon, daemon, start_daemon
from tests.statemanager.test_node_agent_state import run_dir
from tests.worker.agent.test_agent import FakeLauncher

__all__ = ["daemon", "run_dir", "start_daemon"]

Plain = dict[str, Any]
LEASE_S = 1.0
LAUNCH = {
    "deployment": "j/actor",
    "incarnation": 1,
    "kind": "train",
    "group": "g",
    "tenant": "t",
    "spec_json": "{}",
    "ranks": [{"node": "node0", "rank": 0, "gpu": 0}],
}
STOP = {"deployment": "j/actor", "incarnation": 1, "nodes": ["node0"]}


class StoppableScheduler:
    """The scheduler's end: it accepts the node, and can stop to answer heartbeats."""

    def __init__(self, lease_s: float) -> None:
        self._times = {"lease_s": lease_s, "heartbeat_s": 0.1, "silence_s": 0.5}
        self.hellos: asyncio.Queue[tuple[Peer, Plain]] = asyncio.Queue()
        self.ready = asyncio.Event()
        self.is_cut = False

    async def on_link(self, link: Link) -> None:
        reports = dict.fromkeys(("worker_exited", "state_reported"), self._ignore)
        handlers = {"hello": self._hello, "beat": self._beat, "worker_ready": self._on_ready}
        await Peer(link.reader, link.writer, {**handlers, **reports}).run()

    async def _hello(self, peer: Peer, params: Plain) -> Plain:
        if self.is_cut:
            raise errors.UnavailableError("cut off")
        self.hellos.put_nowait((peer, params))
        return self._times

    async def _beat(self, _: Peer, __: Plain) -> Plain:
        if self.is_cut:
            await asyncio.Event().wait()
        return self._times

    async def _on_ready(self, _: Peer, __: Plain) -> Plain:
        self.ready.set()
        return {"wanted": True}

    async def _ignore(self, _: Peer, __: Plain) -> Plain:
        return {}


async def with_agent(
    folder: Path,
    statemanager: Daemon,
    launcher: FakeLauncher,
    ours: TestAuthority,
    addresses: Callable[[Server], tuple[str, ...]],
    test: Callable[[StoppableScheduler], Awaitable[None]],
    lease_s: float = LEASE_S,
) -> None:
    """Run `test` with an agent that connects to a scheduler over TLS."""
    scheduler = StoppableScheduler(lease_s)
    anywhere = TlsAddress("127.0.0.1", 0)
    credentials = ours.credentials(Role.SCHEDULER)
    server = await serve(anywhere, credentials, scheduler.on_link, roles=(Role.NODE,))
    config = AgentConfig(
        node="node0",
        scheduler=addresses(server),
        tls=ours.files(Role.NODE, "node0"),
        statemanager=statemanager.config.listen,
        ticket_key_file=str(statemanager.config.ticket_key_path),
        gpus=1,
        gpu_memory_bytes=1,
        host_memory_bytes=1,
        run_dir=str(folder),
        rendezvous_dir=str(folder),
        data_dir=str(folder),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(Agent(config, launcher).run(stop))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await test(scheduler)
    finally:
        stop.set()
        await asyncio.wait({running}, timeout=DEADLINE_S)
        server.close()
        for worker in launcher.workers:
            worker.close()


def test_a_node_that_is_cut_off_ends_its_workers_with_its_lease_and_says_so(
    run_dir: Path, daemon: Daemon, tmp_path: Path
) -> None:
    launcher = FakeLauncher()

    async def test(scheduler: StoppableScheduler) -> None:
        peer, hello = await scheduler.hellos.get()
        assert not hello["was_fenced"]
        await peer.call("launch", {"command": LAUNCH})
        await scheduler.ready.wait()
        assert launcher.living() == [1]
        scheduler.is_cut = True
        await until(lambda: not launcher.living())
        scheduler.is_cut = False
        peer, hello = await scheduler.hellos.get()
        assert hello["was_fenced"]
        assert hello["workers"] == []
        await peer.call("stop", {"command": STOP})
        peer.close()
        _, hello = await scheduler.hellos.get()
        assert not hello["was_fenced"], "said once"

    ours = TestAuthority(tmp_path)
    address = lambda server: (str(server.address),)  # noqa: E731
    asyncio.run(with_agent(run_dir, daemon, launcher, ours, address, test))


def test_a_node_whose_lease_ends_while_it_describes_itself_lists_no_workers(
    run_dir: Path, daemon: Daemon, tmp_path: Path
) -> None:
    launcher = FakeLauncher()

    async def test(scheduler: StoppableScheduler) -> None:
        peer, _ = await scheduler.hellos.get()
        await peer.call("launch", {"command": LAUNCH})
        await scheduler.ready.wait()
        # The description waits for it, longer than the lease lasts.
        os.kill(daemon.pid, signal.SIGSTOP)
        peer.abort()
        await until(lambda: not launcher.living())
        os.kill(daemon.pid, signal.SIGCONT)
        _, hello = await scheduler.hellos.get()
        assert hello["was_fenced"]
        assert hello["workers"] == []

    ours = TestAuthority(tmp_path)
    address = lambda server: (str(server.address),)  # noqa: E731
    asyncio.run(with_agent(run_dir, daemon, launcher, ours, address, test))


def test_workers_outlive_a_connection_that_is_lost_for_less_than_the_lease(
    run_dir: Path, daemon: Daemon, tmp_path: Path
) -> None:
    launcher = FakeLauncher()

    async def test(scheduler: StoppableScheduler) -> None:
        for _ in range(3):
            peer, hello = await scheduler.hellos.get()
            await peer.call("launch", {"command": LAUNCH})
            await scheduler.ready.wait()
            peer.abort()
        assert [worker["incarnation"] for worker in hello["workers"]] == [1]
        assert launcher.living() == [1]

    # The first addresses are those of standbys, which do not listen.
    nobody = "tls://127.0.0.1:1"
    addresses = lambda server: (nobody, nobody, str(server.address))  # noqa: E731
    agent = with_agent(
        *(run_dir, daemon, launcher, TestAuthority(tmp_path), addresses, test),
        # A busy machine may take longer than a second for the three attempts.
        lease_s=DEADLINE_S,
    )
    asyncio.run(agent)


WORKER = """
import sys, time
from pathlib import Path
from plexrl.worker.process.node_lease import end_with_lease
end_with_lease(Path(sys.argv[1]))
print("runs", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_whose_agent_is_stopped_ends_by_itself(tmp_path: Path, is_stopped: bool) -> None:
    lease = NodeLease(tmp_path / "lease")
    lease.extend(clock(), 600.0)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(lease.file)], stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"runs\n"
        if is_stopped:
            # It was suspended itself when its lease ran out.
            worker.send_signal(signal.SIGSTOP)
        shorter = NodeLease(tmp_path / "other")
        shorter.extend(clock(), 0.5)
        shorter.file.rename(lease.file)
        if is_stopped:
            worker.send_signal(signal.SIGCONT)
        assert worker.wait(DEADLINE_S) == EXIT_LEASE_OVER
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()


def test_an_answer_that_arrives_late_extends_the_lease_from_when_it_was_asked_for(
    tmp_path: Path,
) -> None:
    lease = NodeLease(tmp_path / "lease")
    assert not lease.is_needed
    lease.extend(100.0, 15.0)
    lease.extend(90.0, 15.0)
    assert lease.left_s(110.0) == 5.0
    lease.extend(114.0, 0.0)
    assert lease.left_s(110.0) == 5.0, "a scheduler that grants nothing takes nothing"
    lease.extend(112.0, None)
    assert lease.left_s(115.0) == 0.0

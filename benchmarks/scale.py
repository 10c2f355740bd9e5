"""One scheduler process with many nodes and routers, over mutual TLS.

    python -m benchmarks.scale [--quick] [--json]

The scheduler is the real process with its journal (SQLite). Agents and routers are real connections
with heartbeats, in a few processes, without workers: an agent reports a launched worker as ready at
once, and a router finishes an operation when it gets it. Everything shares this machine's cores, so
the figures are upper bounds.

- Join storm: all agents connect at the same time, as after a restart of the scheduler.
- Heartbeats: round trip while nothing else happens, and the scheduler's use of a core.
- Dispatch: from the submission of an operation to its arrival at a router; each deployment has one
  operation at a time.
"""

import asyncio
import hashlib
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.cluster.join.authority import Authority
from plexrl.errors import ConnectionLostError, NoAnswerError
from plexrl.ids import NodeId, RouterId
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles
from plexrl.wire.links.standing_link import StandingLink
from plexrl.wire.messages.reports import NodeJoined, RouterJoined
from plexrl.wire.rpc import Handler, Peer

NODES = sized(800, quick=8)
ROUTERS = sized(50, quick=2)
AGENT_PROCESSES = sized(4, quick=1)
JOBS = sized(100, quick=2)
GPUS = 8
QUIET_S = sized(30, quick=1)
DISPATCH_S = sized(30, quick=1)
HEARTBEAT_S = 2.5
"""As a scheduler with the default `node_lease_s` asks for."""
END_S = 600.0
OPERATOR = {"tenant": None, "as_operator": True}
Plain = dict[str, Any]


class Agents:
    """Some of the agents, in one process."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._links: list[asyncio.Task[None]] = []
        self._reports: set[asyncio.Task[None]] = set()
        self._joined = 0
        self._all = asyncio.Event()
        self.round_trips_ms: list[float] = []

    async def join(self, files: Mapping[str, TlsFiles]) -> float:
        """Connect all agents at once; returns the seconds until all are accepted."""
        credentials = {node: Credentials(each) for node, each in files.items()}
        begun = time.monotonic()
        for node, own in credentials.items():
            self._links.append(asyncio.create_task(self._agent(node, own, len(files))))
        await self._all.wait()
        return time.monotonic() - begun

    async def _agent(self, node: str, credentials: Credentials, count: int) -> None:
        async def hello() -> NodeJoined:
            return NodeJoined(
                node=NodeId(node),
                gpus=GPUS,
                gpu_memory_bytes=80 << 30,
                host_memory_bytes=1 << 40,
                statemanager=node,
            )

        async def session(peer: Peer) -> None:
            self._joined += 1
            if self._joined == count:
                self._all.set()
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                begun = time.perf_counter()
                try:
                    await peer.call("beat")
                except (ConnectionLostError, NoAnswerError):
                    return
                self.round_trips_ms.append(1e3 * (time.perf_counter() - begun))

        async def launch(peer: Peer, params: Plain) -> Plain:
            command = params["command"]
            for rank in command["ranks"]:
                if rank["node"] != node:
                    continue
                ready = {
                    "deployment": command["deployment"],
                    "rank": rank["rank"],
                    "incarnation": command["incarnation"],
                    "address": "unix:/-",
                }
                task = asyncio.create_task(_call(peer, "worker_ready", ready))
                self._reports.add(task)
                task.add_done_callback(self._reports.discard)
            return {}

        handlers: dict[str, Handler] = {"launch": launch, **_quiet("stop", "release_state")}
        link = StandingLink([self._address], credentials, handlers, hello=hello, session=session)
        await link.run()


def run_agents(address: str, files: Mapping[str, TlsFiles], pipe: Connection) -> None:
    """A process with agents: joins when it is told, then sends its heartbeats' round trips."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        agents = Agents(address)
        await loop.run_in_executor(None, pipe.recv)
        pipe.send(await agents.join(files))
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send(agents.round_trips_ms)
            agents.round_trips_ms.clear()

    asyncio.run(run())


class Routers:
    """All routers, in this process, so that one clock times submission and arrival."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._peers: dict[int, Peer] = {}
        self._all = asyncio.Event()
        self._links: list[asyncio.Task[None]] = []
        self._submitted_at: dict[str, float] = {}
        self._finished: dict[str, asyncio.Event] = {}
        self._reports: set[asyncio.Task[None]] = set()
        self.dispatch_ms: list[float] = []

    async def join(self, files: list[TlsFiles]) -> None:
        """Connect all routers."""
        for index, each in enumerate(files):
            self._links.append(asyncio.create_task(self._router(index, each)))
        await self._all.wait()

    async def close(self) -> None:
        """End all connections."""
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _router(self, index: int, files: TlsFiles) -> None:
        async def hello() -> RouterJoined:
            return RouterJoined(router=RouterId(f"r{index}"))

        async def session(peer: Peer) -> None:
            self._peers[index] = peer
            if len(self._peers) == ROUTERS:
                self._all.set()

        async def run(peer: Peer, params: Plain) -> Plain:
            command = params["command"]
            operation = command["operation"]
            begun = self._submitted_at.pop(operation, None)
            if begun is not None:
                self.dispatch_ms.append(1e3 * (time.perf_counter() - begun))
            done = {"operation": operation, "token": command["token"], "compute_s": 0.001}
            task = asyncio.create_task(self._finish(peer, done))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)
            return {}

        handlers: dict[str, Handler] = {
            "run": run,
            **_quiet("abort", "discard", "forget_callers"),
        }
        link = StandingLink(
            [self._address], Credentials(files), handlers, hello=hello, session=session
        )
        await link.run()

    async def _finish(self, peer: Peer, done: Plain) -> None:
        await peer.call("operation_finished", done)
        waiting = self._finished.pop(done["operation"], None)
        # Nobody waits for the scheduler's own operations, such as loads.
        if waiting is not None:
            waiting.set()

    async def dispatch(self, job: int, until: float) -> None:
        """Submit operations of one job through one router, one after the other."""
        peer = self._peers[job % ROUTERS]
        name = f"job{job}"
        times = {"controller_timeout_s": 1e6, "reattach_timeout_s": 1e6}
        await peer.call("submit_job", {"tenant": "t", "job": name, "name": name, **times})
        deployment = {
            "deployment": f"{name}/actor",
            "job": name,
            "kind": "train",
            "workers": 1,
            "state_bytes": 1 << 30,
            "exclusive": True,
            "spec_json": "{}",
        }
        await peer.call("create_deployment", {**OPERATOR, **deployment})
        count = 0
        while time.perf_counter() < until:
            operation = f"{name}-{count}"
            count += 1
            finished = self._finished[operation] = asyncio.Event()
            if count > 1:
                # The first one waits for its workers.
                self._submitted_at[operation] = time.perf_counter()
            body = {"operation": operation, "deployment": f"{name}/actor", "kind": "barrier"}
            await peer.call("submit_operation", {**OPERATOR, **body})
            async with asyncio.timeout(END_S):
                await finished.wait()


async def _call(peer: Peer, method: str, params: Plain) -> None:
    await peer.call(method, params)


def _quiet(*methods: str) -> dict[str, Handler]:
    async def nothing(_: Peer, __: Plain) -> Plain:
        return {}

    return dict.fromkeys(methods, nothing)


@contextmanager
def scheduler(folder: Path, files: TlsFiles) -> Iterator[tuple[str, int]]:
    """Its address for other machines, and its process id."""
    config = {
        "listen": [f"unix:{folder}/s.sock", "tls://127.0.0.1:0"],
        "tls": {"ca": files.ca, "certificate": files.certificate, "key": files.key},
        "journal": str(folder / "journal.sqlite"),
        "operator_key_digest": hashlib.sha256(b"bench").hexdigest(),
        "tenants": [["t", hashlib.sha256(b"t").hexdigest()]],
    }
    path = folder / "scheduler.json"
    path.write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "plexrl.scheduler", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=(folder / "scheduler.log").open("w"),
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "scheduler.log").read_text()
        yield json.loads(line)["listen"][1], process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def cpu_s(pid: int) -> float:
    """Processor time of a process, all its threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / 100.0


async def measure(folder: Path, authority: Authority) -> dict[str, float]:
    """All figures."""
    nodes = {f"n{i}": authority.issue(folder, Identity(Role.NODE, f"n{i}")) for i in range(NODES)}
    routers = [authority.issue(folder, Identity(Role.ROUTER, f"r{i}")) for i in range(ROUTERS)]
    found: dict[str, float] = {}
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    with scheduler(folder, authority.issue(folder, Identity(Role.SCHEDULER))) as (address, pid):
        found["empty_bytes"] = memory_bytes(pid)
        pipes = []
        for index in range(AGENT_PROCESSES):
            ours, theirs = context.Pipe()
            part = {node: nodes[node] for node in list(nodes)[index::AGENT_PROCESSES]}
            process = context.Process(target=run_agents, args=(address, part, theirs), daemon=True)
            process.start()
            pipes.append(ours)
        began_cpu_s = cpu_s(pid)
        for pipe in pipes:
            pipe.send("join")
        joined = [await loop.run_in_executor(None, pipe.recv) for pipe in pipes]
        found["join_s"], found["join_cpu_s"] = max(joined), cpu_s(pid) - began_cpu_s
        connected = Routers(address)
        await connected.join(routers)
        found["joined_bytes"] = memory_bytes(pid)
        await _round_trips(pipes)
        began_cpu_s = cpu_s(pid)
        await asyncio.sleep(QUIET_S)
        found["heartbeat_cpu"] = (cpu_s(pid) - began_cpu_s) / QUIET_S
        beats = await _round_trips(pipes) or [0.0]
        found["heartbeat_p50_ms"], found["heartbeat_p99_ms"] = (
            percentile(beats, each) for each in (50, 99)
        )
        begun = time.perf_counter()
        until = begun + DISPATCH_S
        await asyncio.gather(*(connected.dispatch(job, until) for job in range(JOBS)))
        taken = connected.dispatch_ms or [0.0]
        found["dispatch_p50_ms"], found["dispatch_p99_ms"] = (
            percentile(taken, each) for each in (50, 99)
        )
        found["operations_s"] = len(taken) / (time.perf_counter() - begun)
        found["end_bytes"] = memory_bytes(pid)
        await connected.close()
        for pipe in pipes:
            pipe.send(False)
    return found


async def _round_trips(pipes: list[Connection]) -> list[float]:
    """Round trips since the last call, in milliseconds."""
    loop = asyncio.get_running_loop()
    for pipe in pipes:
        pipe.send(True)
    parts = [await loop.run_in_executor(None, pipe.recv) for pipe in pipes]
    return [each for part in parts for each in part]


ROWS = (
    ("join storm: until all nodes are accepted (s)", "join_s", 1.0),
    ("join storm: processor time of the scheduler (s)", "join_cpu_s", 1.0),
    ("heartbeats: round trip, median (ms)", "heartbeat_p50_ms", 1.0),
    ("heartbeats: round trip, p99 (ms)", "heartbeat_p99_ms", 1.0),
    ("heartbeats: cores that the scheduler uses", "heartbeat_cpu", 1.0),
    ("dispatch: submission to arrival, median (ms)", "dispatch_p50_ms", 1.0),
    ("dispatch: submission to arrival, p99 (ms)", "dispatch_p99_ms", 1.0),
    ("dispatch: operations a second", "operations_s", 1.0),
    ("memory of the scheduler before (MiB)", "empty_bytes", 2.0**20),
    ("memory with all connections (MiB)", "joined_bytes", 2.0**20),
    ("memory at the end (MiB)", "end_bytes", 2.0**20),
)


def main() -> None:
    """Measure once."""
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as name:
        found = asyncio.run(measure(Path(name), Authority.open(Path(name) / "authority")))
    rows = [(title, f"{found[key] / unit:,.2f}") for title, key, unit in ROWS]
    title = f"{NODES} nodes of {GPUS} GPUs, {ROUTERS} routers, {JOBS} jobs, TLS 1.3"
    report(title, ("", "value"), rows, found)


if __name__ == "__main__":
    main()

"""The StateManager's control plane: a request's round trip, and clean-up after a killed client.

    python benchmarks/statemanager_control.py

Prints one JSON object. The round trip is given beside that of a bare echo between two processes,
taken in turns with it: what is above the echo is ours. Median and 99th percentile are of the
quietest of the rounds, and the median over all rounds is given too.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from plexrl.statemanager.arena import Arena
from plexrl.statemanager.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.ticket_key import read_ticket_key
from plexrl.statemanager.tickets import AGENT, Claims, Role

ROUNDS = 40
REQUESTS = 1000
"""In each round."""
KILLS = 20
MIB = 1 << 20
WORKER = Claims(role=Role.WORKER, job="job", deployment="job/actor")


@contextmanager
def daemon() -> Iterator[StateManagerConfig]:
    """One that serves."""
    with ExitStack() as folders:
        folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="plexrl-")))
        host = folders.enter_context(tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm"))
        config = StateManagerConfig(
            node="bench",
            listen=str(folder / "s"),
            host_dir=f"{host}/host",
            host_bytes=64 * MIB,
            nvme_dir=str(folder / "nvme"),
            nvme_bytes=64 * MIB,
        )
        text = msgspec.json.encode(config).decode()
        command = [sys.executable, "-m", "plexrl.statemanager", "--config-json", text]
        command.append("--end-with-parent")
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield config
            finally:
                process.terminate()


def client(config: StateManagerConfig, claims: Claims) -> StateManagerClient:
    """One with a ticket that says `claims`."""
    return StateManagerClient(
        config.listen,
        deployment=claims.deployment,
        rank=claims.rank,
        world_size=claims.world_size,
        ticket=read_ticket_key(config.ticket_key_path).mint(claims),
    )


@contextmanager
def echo() -> Iterator[Callable[[], object]]:
    """A round trip to a process that gives back what it gets, and does nothing else."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        while said := theirs.recv(4096):
            theirs.sendall(said)
        os._exit(0)
    theirs.close()

    def ask() -> None:
        ours.sendall(b"x" * 16)
        ours.recv(4096)

    yield ask
    ours.close()
    os.waitpid(child, 0)


def times_us(ask: Callable[[], object]) -> list[float]:
    """Sorted."""
    found = []
    for _ in range(REQUESTS):
        began = time.perf_counter_ns()
        ask()
        found.append((time.perf_counter_ns() - began) / 1e3)
    return sorted(found)


def round_trips(config: StateManagerConfig) -> dict[str, float]:
    """Microseconds."""
    rounds: dict[str, list[list[float]]] = {"bare_echo": [], "control": []}
    with echo() as bare:
        agent = client(config, AGENT)
        agent.ping()
        for _ in range(ROUNDS):
            rounds["bare_echo"].append(times_us(bare))
            rounds["control"].append(times_us(agent.ping))
        agent.close()
    figures = {}
    for name, found in rounds.items():
        medians = [times[REQUESTS // 2] for times in found]
        quietest = found[medians.index(min(medians))]
        figures[f"{name}_p50_us"] = quietest[REQUESTS // 2]
        figures[f"{name}_p99_us"] = quietest[REQUESTS * 99 // 100]
        figures[f"{name}_p50_us_all_rounds"] = statistics.median(medians)
    return figures


def cleanups_ms(config: StateManagerConfig) -> list[float]:
    """From `kill -9` of a worker until the daemon has forgotten its arena; sorted."""
    agent = client(config, AGENT)
    found = []
    for _ in range(KILLS):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            arena = Arena(16 * MIB)
            worker = client(config, WORKER)
            worker.register(arena, (), group="g", token=1)
            os.write(writer, b"r")
            signal.pause()
        os.read(reader, 1)
        assert agent.usage()["deployments"]
        began = time.perf_counter()
        os.kill(child, signal.SIGKILL)
        while agent.usage()["deployments"]:
            time.sleep(0.0002)
        found.append(1e3 * (time.perf_counter() - began))
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    agent.close()
    return sorted(found)


def main() -> None:
    """Measure and print."""
    with daemon() as config:
        figures = round_trips(config)
        cleanups = cleanups_ms(config)
    figures["cleanup_after_kill_ms_p50"] = cleanups[KILLS // 2]
    figures["cleanup_after_kill_ms_max"] = cleanups[-1]
    sys.stdout.write(json.dumps({name: round(value, 2) for name, value in figures.items()}) + "\n")


if __name__ == "__main__":
    main()

"""A real daemon in a process of its own, over a real socket, memory file system and disk."""

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketRole, job_of
from plexrl.wire.messages import SaveRequest
from tests.statemanager.memory_files import memory_file_bytes
from tests.warm_start import start_part

DEADLINE_S = 60.0
NETWORK = Network(is_trusted=True)
"""Of clients of daemons that share a trusted network."""
POLL_S = 0.005
MIB = 1 << 20
ALL_PARTS = frozenset({StatePart.PARAMETER, StatePart.OPTIMIZER})


class Daemon:
    """One StateManager process; can be killed, ended and started again on the same directories."""

    def __init__(self, config: StateManagerConfig) -> None:
        self.config = config
        self.process: subprocess.Popen[str] | None = None
        self.tcp = ""
        """Address at which it serves other nodes, if it does."""

    def start(self, launcher: Sequence[str] = ()) -> None:
        """Return when it serves; `launcher` is a command that becomes the daemon's."""
        path = Path(self.config.nvme_dir).parent / "config.json"
        path.write_bytes(msgspec.json.encode(self.config))
        self.process = start_part(
            "plexrl.statemanager",
            ("--config", str(path), "--end-with-parent"),
            launcher,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready, self.process.communicate()[1]
        said = json.loads(ready)
        assert said["ready"]
        self.tcp = said.get("serve_tcp", "")

    def limit_files(self, nbytes: int) -> None:
        """From now on no file of it can grow beyond this: for it, its file systems are full."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    def limit_files_no_more(self) -> None:
        """There is room again."""
        self.limit_files(resource.RLIM_INFINITY)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process is not None and self.process.poll() is None

    def wait(self) -> None:
        """Clear away a process that ended by itself."""
        assert self.process is not None
        self.process.communicate(timeout=DEADLINE_S)
        self.process = None

    def with_config(self, **changes: Any) -> StateManagerConfig:
        """Its configuration with some fields changed."""
        return replace(self.config, **changes)

    def terminate(self) -> str:
        """End it cleanly; returns its log."""
        log, status = self._end(signal.SIGTERM)
        assert status == 0, log
        return log

    def _end(self, sig: signal.Signals) -> tuple[str, int]:
        assert self.process is not None
        self.process.send_signal(sig)
        _, log = self.process.communicate(timeout=DEADLINE_S)
        status = self.process.returncode
        self.process = None
        return log, status

    def clean_up(self) -> None:
        """Leave nothing behind. Its log is in the report of a test that fails."""
        if self.process is not None:
            found = self.process.poll()
            log, _ = self._end(signal.SIGKILL)
            state = "lived" if found is None else f"ended with {found}"
            logging.getLogger(__name__).warning("%s %s:\n%s", self.config.node, state, log)
        shutil.rmtree(self.config.host_dir, ignore_errors=True)

    def descriptors(self) -> int:
        """How many the process has open, without those of its tiers' and its device's memory, which
        it keeps."""
        found = []
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            # One may be closed while they are listed.
            with contextlib.suppress(FileNotFoundError):
                found.append(path.readlink().name)
        return len([name for name in found if "segment" not in name])

    def segment_bytes(self) -> int:
        """Device memory that the process has open or mapped, lent or idle."""
        return memory_file_bytes("plexrl-segment", pid=self.pid)

    def host_files(self) -> list[Path]:
        """Headers in the host tier's directory, and leftovers of some."""
        directory = Path(self.config.host_dir)
        return sorted(directory.glob("*.version")) + sorted(directory.glob("*.part"))

    def nvme_files(self) -> list[Path]:
        """Headers in the NVMe tier's directory, and leftovers of anything."""
        directory = Path(self.config.nvme_dir)
        return sorted(directory.glob("*.version")) + sorted(directory.glob("*.part"))

    def nvme_objects(self) -> list[Path]:
        """Files of data there."""
        return sorted(Path(self.config.nvme_dir).glob("*.object"))

    def ticket(self, **claims: Any) -> bytes:
        """One of this node's, with these claims."""
        return read_ticket_key(self.config.ticket_key_path).mint(Claims(**claims))

    def worker_ticket(self, deployment: str, rank: int = 0, world_size: int = 1) -> bytes:
        """As the node agent gives to a rank."""
        return self.ticket(
            role=TicketRole.WORKER,
            job=job_of(deployment),
            deployment=deployment,
            rank=rank,
            world_size=world_size,
        )

    def agent(self, timeout_s: float = DEADLINE_S) -> StateManagerClient:
        """A client of the node agent's, for the caller to close."""
        return StateManagerClient(
            self.config.listen,
            deployment="",
            rank=0,
            world_size=1,
            ticket=self.ticket(role=TicketRole.AGENT),
            timeout_s=timeout_s,
        )


StartDaemon = Callable[..., Daemon]


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Starts daemons with the given config fields changed; ends them all."""
    daemons: list[Daemon] = []
    # A socket's path may have 107 bytes, which pytest's own directories can exceed.
    run_dir = Path(tempfile.mkdtemp(prefix="plexrl-"))

    def start(**changes: Any) -> Daemon:
        node = f"node{len(daemons)}"
        (tmp_path / node).mkdir()
        fields: dict[str, Any] = {
            "node": node,
            "listen": str(run_dir / f"{node}.sock"),
            "host_dir": tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"),
            "host_bytes": 256 * MIB,
            "nvme_dir": str(tmp_path / node / "nvme"),
            "nvme_bytes": 256 * MIB,
            "ticket_key_file": str(tmp_path / "ticket.key"),
            "fabric": "trusted",
        }
        daemon = Daemon(StateManagerConfig(**{**fields, **changes}))
        daemons.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in daemons:
        daemon.clean_up()
    shutil.rmtree(run_dir)


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """One with room for everything."""
    return start_daemon()


class Shard:
    """One rank as a worker has it: an arena with parameters and their optimizer state, and a
    client."""

    def __init__(
        self,
        daemon: Daemon,
        *,
        deployment: str = "job/actor",
        rank: int = 0,
        world_size: int = 1,
        elements: int = 64 * 1024,
        token: int = 1,
        group: str = "g",
        timeout_s: float = DEADLINE_S,
        names: Sequence[str] = ("w",),
    ) -> None:
        self.token, self.group, self.deployment = token, group, deployment
        keys = [
            *(StateKey(part=StatePart.PARAMETER, name=name) for name in names),
            *(StateKey(part=StatePart.OPTIMIZER, name=f"{name}/exp_avg") for name in names),
        ]
        self.slices = tuple(
            StateSlice(
                key=key,
                dtype="F32",
                global_shape=(world_size * elements,),
                offset=(rank * elements,),
                shape=(elements,),
                arena_offset=index * elements * 4,
            )
            for index, key in enumerate(keys)
        )
        self.arena = Arena(len(keys) * elements * 4)
        self.client = StateManagerClient(
            daemon.config.listen,
            deployment=deployment,
            rank=rank,
            world_size=world_size,
            ticket=daemon.worker_ticket(deployment, rank, world_size),
            timeout_s=timeout_s,
        )
        self.agent = daemon.agent(timeout_s)
        """The node agent's client: it sees and does what no worker may."""
        self.contents: npt.NDArray[np.uint8] = np.frombuffer(self.arena.buffer, dtype=np.uint8)

    def register(self) -> None:
        self.client.register(self.arena, self.slices, group=self.group, token=self.token)

    def fill(self, seed: int) -> npt.NDArray[np.uint8]:
        """Make the arena what version `seed` should be; returns a copy."""
        np.copyto(self.contents, self.version(seed))
        return self.contents.copy()

    def version(self, seed: int) -> npt.NDArray[np.uint8]:
        """Bits of version `seed`: arbitrary, and never those of another version."""
        return np.random.default_rng(seed).integers(0, 256, self.contents.size, dtype=np.uint8)

    def offload(self, seq: int, *, keep_seq: int = 0, **fields: Any) -> Any:
        return self.client.offload(*self._order(seq, keep_seq, fields), **fields)

    def snapshot(self, seq: int, *, keep_seq: int = 0, **fields: Any) -> Any:
        return self.client.snapshot(*self._order(seq, keep_seq, fields), **fields)

    def _order(self, seq: int, keep_seq: int, fields: dict[str, Any]) -> tuple[SaveRequest]:
        """The order of a save; `fields` keep what is beside it."""
        fields.setdefault("parts", ALL_PARTS)
        successor, successor_seq = fields.pop("successor", ("", 0))
        ordered = {
            name: fields.pop(name) for name in SaveRequest.__struct_fields__ if name in fields
        }
        return (
            SaveRequest(
                **{"token": self.token, **ordered},
                seq=seq,
                keep_seq=keep_seq,
                successor=successor,
                successor_seq=successor_seq,
            ),
        )

    def load(self, seq: int) -> Any:
        return self.client.load(seq=seq, token=self.token)

    def close(self) -> None:
        self.client.close()
        self.agent.close()
        self.arena.close()


MakeShard = Callable[..., Shard]


@pytest.fixture
def make_shard() -> Iterator[MakeShard]:
    """Makes registered shards of a daemon; closes them."""
    shards: list[Shard] = []

    def make(daemon: Daemon, *, registered: bool = True, **fields: Any) -> Shard:
        shard = Shard(daemon, **fields)
        shards.append(shard)
        if registered:
            shard.register()
        return shard

    yield make
    for shard in shards:
        shard.close()


def daemon_in(folder: Path, nbytes: int) -> Daemon:
    """One that runs, with a host and an NVMe tier of `nbytes` each; its owner cleans up."""
    made = Daemon(
        StateManagerConfig(
            node="n",
            listen=str(folder / "sm.sock"),
            host_dir=tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"),
            host_bytes=nbytes,
            nvme_dir=str(folder / "nvme"),
            nvme_bytes=nbytes,
            checkpoint_url=str(folder),
        )
    )
    made.start()
    return made


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once `holds()`; fail when it does not in time."""
    pause = threading.Event()
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if holds():
            return
        pause.wait(POLL_S)
    pytest.fail("it did not come to hold in time")


def run_together(*calls: Callable[[], object]) -> None:
    """Run the calls at once, each on a thread, and raise what the first of them raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(timeout=DEADLINE_S)

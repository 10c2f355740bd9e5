"""The optimizer in host memory: its step beside plain torch, and its switches beside the other's.

Steps are timed in turns with a plain loop of torch's fused AdamW over as many parameters, on one
thread; the best of the rounds counts. Switches move 50 million parameters of one rank, a step
between each two.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch

from benchmarks.sizes import sized
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.layout.keys import StateKey, StatePart
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.wire.messages import SaveRequest
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.arena_tensors import ArenaLayout, span, whole_box
from plexrl.worker.state.host.optimizer import HostAdamW
from plexrl.worker.state.host.transfer import HostRun
from plexrl.worker.training.flat_state import STEP

ELEMENTS = sized(50_000_000 // 16 * 16, quick=1 << 16)
ROUNDS = sized(7, quick=2)
GIB = 1 << 30
PARAMS = AdamParams(learning_rate=1e-4)
PARTS = frozenset({StatePart.PARAMETER, StatePart.OPTIMIZER})


class Rank:
    """One rank with its optimizer's state on the device or in host memory."""

    def __init__(self, config: StateManagerConfig, *, in_host: bool) -> None:
        layout = ArenaLayout()
        self._places = [
            _add(layout, part, name)
            for part, name in ((StatePart.PARAMETER, "w"), (StatePart.GRADIENT, "w"))
        ]
        optimizer = ArenaLayout(host_start(layout.nbytes)) if in_host else layout
        moments = [
            _add(optimizer, StatePart.OPTIMIZER, f"w/{name}") for name in ("exp_avg", "exp_avg_sq")
        ]
        step = optimizer.add(STEP, whole_box(())).arena_offset
        start = host_start(layout.nbytes)
        self.arena = Arena(layout.nbytes)
        self.host = HostArena(optimizer.nbytes - start) if in_host else None
        self._slices = (*layout.slices, *(optimizer.slices if in_host else ()))
        parameter, gradient = (span(self.arena, at, ELEMENTS) for at in self._places)
        name = "j/host" if in_host else "j/device"
        claims = Claims(role=TicketRole.WORKER, job="j", deployment=name)
        self.client = StateManagerClient(
            config.listen,
            deployment=name,
            rank=0,
            world_size=1,
            ticket=read_ticket_key(config.ticket_key_path).mint(claims),
        )
        self.register()
        gradient.fill_(1e-3)
        if self.host is not None:
            places = tuple((at - start) // 4 for at in (*moments, step))
            self._host_step = HostAdamW(
                self.host,
                [HostRun(parameter, gradient, 0)],
                moments=(places[0], places[1]),
                step=places[2],
            )
        else:
            flat = torch.nn.Parameter(parameter)
            flat.grad = gradient
            self._optimizer = torch.optim.AdamW([flat], fused=True)
            self._optimizer.state[flat] = {
                "step": span(self.arena, step, 1).view(()),
                "exp_avg": span(self.arena, moments[0], ELEMENTS),
                "exp_avg_sq": span(self.arena, moments[1], ELEMENTS),
            }

    def register(self) -> None:
        """Have it known to the daemon."""
        self.client.register(self.arena, self._slices, group="g", token=1, host=self.host)

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        if self.host is not None:
            self._host_step.step(PARAMS)
        else:
            self._optimizer.step()
        return time.perf_counter() - began

    def switch(self, seq: int) -> tuple[int, float, float]:
        """(bytes moved both ways, seconds out, seconds in again)."""
        began = time.perf_counter()
        out = self.client.offload(SaveRequest(seq=seq, token=1), parts=PARTS)
        middle = time.perf_counter()
        self.register()
        back = self.client.load(seq=seq, token=1)
        ended = time.perf_counter()
        return out.bytes_moved + back.bytes_moved, middle - began, ended - middle

    def close(self) -> None:
        """Give everything back."""
        self.client.close()
        if self.host is not None:
            self.host.detach()
        self.arena.close()


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _daemon() as config:
            figures = _steps(config)
        for in_host in (False, True):
            with _daemon() as config:
                figures |= _switches(config, in_host=in_host)
    finally:
        torch.set_num_threads(threads)
    share = figures["host_switch_bytes"] / figures["device_switch_bytes"]
    figures["host_switch_bytes_share"] = share
    rows: list[tuple[str, ...]] = [
        (
            "host optimizer, a step in place",
            f"{figures['host_step_gparams_s']:.2f} Gparam/s",
            f"{figures['plain_step_gparams_s']:.2f} Gparam/s (torch)",
            f"{figures['host_step_ratio']:.2f}",
        ),
        (
            "host optimizer, the first step after a switch",
            f"{figures['host_first_step_gparams_s']:.2f} Gparam/s",
            f"{figures['plain_step_gparams_s']:.2f} Gparam/s (torch)",
            f"{figures['host_first_step_ratio']:.2f}",
        ),
        (
            "host optimizer, bytes of a switch of 50 M parameters",
            f"{figures['host_switch_bytes'] / 1e6:.0f} MB",
            f"{figures['device_switch_bytes'] / 1e6:.0f} MB (on the device)",
            f"{share:.2f}",
        ),
        (
            "host optimizer, seconds of a switch, out and in",
            f"{figures['host_switch_s']:.3f} s",
            f"{figures['device_switch_s']:.3f} s (on the device)",
            f"{figures['host_switch_s'] / figures['device_switch_s']:.2f}",
        ),
    ]
    return rows, figures


def _steps(config: StateManagerConfig) -> dict[str, float]:
    rank, on_device = (Rank(config, in_host=in_host) for in_host in (True, False))
    plain = torch.nn.Parameter(torch.zeros(ELEMENTS))
    plain.grad = torch.full((ELEMENTS,), 1e-3)
    optimizer = torch.optim.AdamW([plain], lr=PARAMS.learning_rate, fused=True)
    ours, firsts, theirs, lent = [], [], [], []
    optimizer.step()
    rank.step()
    for number in range(ROUNDS):
        began = time.perf_counter()
        optimizer.step()
        theirs.append(time.perf_counter() - began)
        ours.append(rank.step())
        lent.append(on_device.step())
        # What follows a version copies the moments to memory newly borrowed.
        rank.client.snapshot(SaveRequest(seq=number + 1, keep_seq=number, token=1), parts=PARTS)
        firsts.append(rank.step())
    rank.close()
    on_device.close()
    in_place, first, plain_s = min(ours), min(firsts[1:]), min(theirs)
    return {
        "host_step_gparams_s": ELEMENTS / in_place / 1e9,
        "host_first_step_gparams_s": ELEMENTS / first / 1e9,
        "plain_step_gparams_s": ELEMENTS / plain_s / 1e9,
        "host_step_ratio": plain_s / in_place,
        "host_step_ratio_median": statistics.median(
            plain / own for plain, own in zip(theirs, ours, strict=True)
        ),
        "host_step_ratio_to_device_arena": min(lent) / in_place,
        "host_first_step_ratio": plain_s / first,
    }


def _switches(config: StateManagerConfig, *, in_host: bool) -> dict[str, float]:
    rank = Rank(config, in_host=in_host)
    found = []
    for seq in range(1, ROUNDS + 1):
        rank.step()
        found.append(rank.switch(seq))
    rank.close()
    kind = "host" if in_host else "device"
    return {
        f"{kind}_switch_bytes": found[-1][0],
        f"{kind}_switch_s": min(out_s + in_s for _, out_s, in_s in found[1:]),
        f"{kind}_offload_s": min(out_s for _, out_s, _ in found[1:]),
        f"{kind}_load_s": min(in_s for _, _, in_s in found[1:]),
    }


def _add(layout: ArenaLayout, part: StatePart, name: str) -> int:
    key = StateKey(part=part, name=name)
    return layout.add(key, whole_box((ELEMENTS,))).arena_offset


@contextmanager
def _daemon() -> Iterator[StateManagerConfig]:
    with ExitStack() as folders:
        folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="plexrl-")))
        host = folders.enter_context(tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm"))
        config = StateManagerConfig(
            node="bench",
            listen=str(folder / "s"),
            host_dir=f"{host}/host",
            host_bytes=2 * GIB,
            nvme_dir=str(folder / "nvme"),
            nvme_bytes=1 << 20,
        )
        text = msgspec.json.encode(config).decode()
        command = [sys.executable, "-m", "plexrl.statemanager", "--config-json", text]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield config
            finally:
                # Nothing here is to be kept on a disk.
                process.kill()

"""The NVMe tier beside `fio` at its block size and queue depth, both with random data.

A disk's rate may double from one second to the next, so each move has a run of `fio` of its own,
next to it, and the ratio is the median of such pairs. Both read what they wrote in the same round.
"""

from dataclasses import replace
from pathlib import Path

from benchmarks.sizes import sized
from benchmarks.state.baselines import GB, MIB, Seconds, Work, fio, in_turns, timed
from benchmarks.state.rig import Figures, Rows, fill_randomly, folders, manifest_of, row, tensors
from plexrl.statemanager.config import TenantLimit
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName

STATE_BYTES = sized(512 * MIB, quick=8 * MIB)
DEPTH = 8
ROUNDS = sized(15, quick=1)
STRAIGHT = "straight"
"""A tenant whose state goes to NVMe at once."""

WRITES = {"spill": "host → NVMe", "put": "arena → NVMe"}
READS = {"prefetch": "NVMe → host", "load": "NVMe → arena"}


def measure() -> tuple[Rows, Figures]:
    """Both directions, from and to either memory."""
    with folders(nvme_queue_depth=DEPTH) as config:
        store = Store(config)
        try:
            store.quotas.limits[STRAIGHT] = TenantLimit(host_bytes=0)
            folder = Path(config.nvme_dir).parent
            plain = {kind: fio(folder, kind, STATE_BYTES, DEPTH) for kind in ("write", "read")}
            works: dict[str, Work] = {}
            for move, work in _works(store).items():
                works[move] = work
                baseline = plain["write" if move in WRITES else "read"]
                if baseline is not None:
                    works[_beside(move)] = baseline
            found = in_turns(works, ROUNDS)
        finally:
            store.close()
    rows: Rows = []
    figures: Figures = {}
    for kind, moves in (("write", WRITES), ("read", READS)):
        ratios = []
        for move, way in moves.items():
            rate = STATE_BYTES / found.best_s(move) / GB
            figures[f"nvme_{move}_gb_s"] = rate
            fio_run = _beside(move)
            if fio_run not in works:
                rows.append(row(f"{move}, {way}", f"{rate:.2f} GB/s"))
                continue
            ratios.append(found.usual_ratio(move, fio_run))
            figures[f"nvme_{move}_ratio"] = ratios[-1]
            value = f"{rate:.2f} GB/s, {found.ratio(move, fio_run):.2f}"
            usual = f"{ratios[-1]:.2f}"
            rows.append(row(f"{move}, {way}, of fio {kind}", value, usual, "≥ 0.9"))
        if ratios:
            figures[f"nvme_{kind}_ratio"] = min(ratios)
            figures[f"fio_{kind}_gb_s"] = (
                STATE_BYTES / min(found.best_s(_beside(move)) for move in moves) / GB
            )
            name = f"nvme_{kind}_ratio, the worse of these"
            rows.append(row(name, "", f"{min(ratios):.2f}"))
    return rows, figures


def _beside(move: str) -> str:
    """Name of the run of `fio` next to a move."""
    return f"fio beside {move}"


def _works(store: Store) -> dict[str, Work]:
    devices = CpuDevice()
    loan = devices.allocate(STATE_BYTES, device=0, uid=0)
    fill_randomly(loan, STATE_BYTES)
    slices = tensors(STATE_BYTES // (4 * MIB), 4 * MIB)
    manifest = manifest_of(slices)
    straight = replace(manifest, tenant=STRAIGHT, seq=2)

    def spill() -> Seconds:
        store.drop([manifest.name])
        store.put(manifest, loan)
        return timed(store.persist)

    def put() -> Seconds:
        store.drop([straight.name])
        return timed(lambda: store.put(straight, loan))

    def load() -> Seconds:
        return timed(lambda: store.load(straight.name, "it", loan))

    def prefetch() -> Seconds:
        assert store.find(lambda m: m.seq == 1)[0].tier == TierName.NVME
        return timed(lambda: store.prefetch(manifest.name, "it"))

    return {"spill": spill, "prefetch": prefetch, "put": put, "load": load}

"""Between an arena and the host tier: the copy itself, and whole switches as a worker sees them."""

from dataclasses import replace

import numpy as np

from benchmarks.sizes import sized
from benchmarks.state.baselines import GB, MIB, Memcpy, Work, in_turns, timed
from benchmarks.state.rig import (
    Figures,
    Rank,
    Rows,
    daemon,
    fill_randomly,
    folders,
    manifest_of,
    row,
    tensors,
)
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.store.store import Store

TENSOR_BYTES = 4 * MIB
STATE_BYTES = sized(512 * MIB, quick=8 * MIB)
BASELINE_BLOCKS = (4 * MIB, 64 * MIB, STATE_BYTES)
"""The largest as one piece for each thread."""
SWITCH_MIB = sized((1, 4, 16, 64, 256, 512), quick=(1, 4))
LARGE_MIB = sized(256, quick=4)
"""From this size on a switch is compared with plain copies."""
SWITCHES = sized(9, quick=1)
COPIES = sized(15, quick=1)


def measure_copies() -> tuple[Rows, Figures]:
    """The store's own moves of resident memory, without a daemon around it."""
    rows: Rows = []
    figures: Figures = {}
    memcpy = Memcpy(STATE_BYTES)
    for threads in (1, 2):
        with folders(data_threads=threads) as config:
            store = Store(config)
            try:
                plain = {
                    f"memcpy {block // MIB} MiB": memcpy.work(threads, block)
                    for block in BASELINE_BLOCKS
                }
                found = in_turns({**plain, **_moves(store)}, COPIES)
            finally:
                store.close()
        best = min(plain, key=found.best_s)
        for move in ("put", "load"):
            ratio = found.ratio(move, best)
            usual = found.usual_ratio(move, best)
            figures[f"host_{move}_ratio_{threads}"] = ratio
            figures[f"host_{move}_ratio_{threads}_usual"] = usual
            rate = f"{STATE_BYTES / found.best_s(move) / GB:.1f} GB/s, {ratio:.2f}"
            name = f"{move} of {STATE_BYTES // MIB} MiB in host, {threads} threads, of memcpy"
            rows.append(row(name, rate, f"{usual:.2f}", "≥ 0.9"))
        figures[f"memcpy_gb_s_{threads}"] = STATE_BYTES / found.best_s(best) / GB
    figures["host_copy_ratio"] = min(
        figures[f"host_{move}_ratio_{threads}"] for move in ("put", "load") for threads in (1, 2)
    )
    rows.append(row("host_copy_ratio, the worst of these", f"{figures['host_copy_ratio']:.2f}"))
    return rows, figures


def _moves(store: Store) -> dict[str, Work]:
    devices = CpuDevice()
    loan = devices.allocate(STATE_BYTES, device=0, uid=0)
    fill_randomly(loan, STATE_BYTES)
    slices = tensors(STATE_BYTES // TENSOR_BYTES, TENSOR_BYTES)
    manifest = manifest_of(slices)
    latest = [manifest]

    def put() -> float:
        before = latest[0]
        latest[0] = replace(before, seq=before.seq + 1)
        took = timed(lambda: store.put(latest[0], loan))
        store.drop([before.name])
        return took

    return {"put": put, "load": lambda: timed(lambda: store.load(latest[0].name, "it", loan))}


def measure_switches() -> tuple[Rows, Figures]:
    """What a worker waits for when its state leaves and comes back, lent memory included. The state
    is random, and all of it changes between two switches."""
    rows: Rows = []
    figures: Figures = {}
    medians: dict[str, list[float]] = {"offload": [], "load": []}
    ratios: dict[str, list[float]] = {"offload": [], "load": []}
    with daemon() as served:
        for size in SWITCH_MIB:
            rank = Rank(served, tensors(max(1, size // 4), min(4, size) * MIB))
            works = _switches(rank)
            if size >= LARGE_MIB:
                works["memcpy"] = Memcpy(size * MIB).work(2)
            found = in_turns(works, SWITCHES)
            for move, times in medians.items():
                times.append(1e3 * found.median_s(move))
                figures[f"{move}_{size}_mib_ms"] = 1e3 * found.median_s(move)
            rows.append(
                row(
                    f"offload, load of {size} MiB, as a worker waits",
                    "{:.2f}, {:.2f} ms".format(*(1e3 * found.best_s(m) for m in medians)),
                    "{:.2f}, {:.2f}".format(*(times[-1] for times in medians.values())),
                )
            )
            for move in medians if "memcpy" in works else ():
                ratios[move].append(found.usual_ratio(move, "memcpy"))
                name = f"whole {move} of {size} MiB, of a plain copy"
                best = f"{found.ratio(move, 'memcpy'):.2f}"
                rows.append(row(name, best, f"{ratios[move][-1]:.2f}", "≥ 0.9"))
            rank.client.close()
    for move, way in (("offload", "out"), ("load", "in")):
        figures[f"switch_{way}_ratio"] = min(ratios[move])
    for move, times in medians.items():
        slope, constant = np.polyfit(SWITCH_MIB, times, 1)
        figures[f"{move}_constant_ms"] = float(constant)
        figures[f"{move}_gb_s"] = MIB / slope * 1e3 / GB
        fit = f"{constant:.2f} ms + 1 / {figures[f'{move}_gb_s']:.1f} GB/s"
        rows.append(row(f"{move} against size: linear fit", fit))
    return rows, figures


def _switches(rank: Rank) -> dict[str, Work]:
    """An offload of a changed state, and its load."""
    rank.fill()
    seq = 0

    def offload() -> float:
        nonlocal seq
        seq += 1
        rank.change()
        return timed(lambda: rank.offload(seq))

    return {"offload": offload, "load": lambda: timed(lambda: rank.load(seq))}

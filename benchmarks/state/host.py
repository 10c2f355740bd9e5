"""Between an arena and the host tier: whole switches, as a worker sees them."""

import statistics
import time
from functools import partial

import numpy as np

from benchmarks.sizes import sized
from benchmarks.state.baselines import GB, MIB, Memcpy, Work, in_turns, timed
from benchmarks.state.rig import (
    Figures,
    Rank,
    Rows,
    daemon,
    row,
    tensors,
)

SWITCH_MIB = sized((1, 4, 16, 64, 256, 512), quick=(1, 4))
LARGE_MIB = sized(256, quick=4)
"""From this size on a switch is compared with plain copies."""
SWITCHES = sized(9, quick=1)


def measure_switches() -> tuple[Rows, Figures]:
    """What a worker waits for when its state leaves and comes back, lent memory included. The state
    is random, and all of it changes between two switches; what the plain copy beside an offload
    copies changes as well."""
    rows: Rows = []
    figures: Figures = {}
    medians: dict[str, list[float]] = {"offload": [], "load": []}
    ratios: dict[str, list[float]] = {"offload": [], "load": []}
    with daemon() as served:
        for size in SWITCH_MIB:
            rank = Rank(served, tensors(max(1, size // 4), min(4, size) * MIB))
            works = _switches(rank)
            if size >= LARGE_MIB:
                plain = Memcpy(size * MIB)
                works |= {
                    "copy beside load": plain.work(2),
                    "copy beside offload": plain.changed_work(2),
                    "fresh": plain.fresh_work(2),
                }
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
            for move in medians if size >= LARGE_MIB else ():
                plain_copy = f"copy beside {move}"
                ratios[move].append(found.usual_ratio(move, plain_copy))
                name = f"whole {move} of {size} MiB, of a plain copy"
                best = f"{found.ratio(move, plain_copy):.2f}"
                rows.append(row(name, best, f"{ratios[move][-1]:.2f}", "≥ 0.9"))
                usual = f"{found.usual_ratio(move, 'fresh'):.2f}"
                rows.append(
                    row(f"{name} to new memory", f"{found.ratio(move, 'fresh'):.2f}", usual)
                )
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


def measure_overlap() -> tuple[Rows, Figures]:
    """Switches there and back between two jobs of one device that has room for both states, against
    the same with the load after the offload. All of each state changes before it leaves."""
    size = LARGE_MIB
    slices = tensors(max(1, size // 4), min(4, size) * MIB)
    prefetched: list[float] = []
    with daemon(device_bytes=3 * size * MIB) as served:
        ranks = [Rank(served, slices, deployment=name) for name in ("one/actor", "two/actor")]
        seqs = [1, 1]
        for rank in ranks:
            rank.fill()
            rank.offload(1)
        ranks[0].load(1)

        def there_and_back(*, overlapped: bool) -> float:
            took_s = 0.0
            for index in (0, 1):
                leaving, coming = ranks[index], ranks[1 - index]
                leaving.change()
                seqs[index] += 1
                successor = (coming.deployment, seqs[1 - index]) if overlapped else ("", 0)
                took_s += timed(partial(leaving.offload, seqs[index], successor))
                started = time.perf_counter()
                report = coming.load(seqs[1 - index])
                took_s += time.perf_counter() - started
                if overlapped:
                    prefetched.append(report.prefetched_bytes / report.bytes_moved)
            return took_s

        found = in_turns(
            {
                "overlapped": lambda: there_and_back(overlapped=True),
                "sequential": lambda: there_and_back(overlapped=False),
            },
            SWITCHES,
        )
        for rank in ranks:
            rank.client.close()
    ratio = 1.0 / found.usual_ratio("overlapped", "sequential")
    figures = {
        "overlapped_switch_ratio": ratio,
        "overlapped_switch_prefetched": statistics.median(prefetched),
    }
    what = f"overlapped switch of {size} MiB each way, of one in sequence"
    best = f"{1.0 / found.ratio('overlapped', 'sequential'):.2f}"
    return [row(what, best, f"{ratio:.2f}")], figures


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

"""Bytes that data-parallel replicas share, and versions of many small tensors."""

from benchmarks.sizes import sized
from benchmarks.state.baselines import GB, MIB, Memcpy, in_turns, timed
from benchmarks.state.rig import Figures, Rank, Rows, daemon, row, tensors

REPLICAS = sized((2, 4, 8), quick=(2,))
SHARED_BYTES = sized(48 * MIB, quick=12 * MIB)
OBJECTS = sized(10_000, quick=100)
OBJECT_BYTES = 48 << 10
"""64 KiB at most."""
GAP_BYTES = 64
ROUNDS = sized(7, quick=1)


def measure() -> tuple[Rows, Figures]:
    """Deduplication, then small tensors."""
    rows: Rows = []
    figures: Figures = {}
    for count in REPLICAS:
        factor = _dedup_factor(count)
        figures[f"dedup_factor_{count}"] = factor
        rows.append(row(f"dedup_factor of {count} replicas", f"{factor:.2f}", "", str(count)))
    figures["dedup_factor"] = min(figures[f"dedup_factor_{count}"] / count for count in REPLICAS)
    rows.append(row("dedup_factor of what is possible", f"{figures['dedup_factor']:.3f}"))
    found, numbers = _small_tensors()
    return rows + found, figures | numbers


def _dedup_factor(count: int) -> float:
    """Bytes that the ranks stored for each byte that the host tier took."""
    with daemon(host_bytes=1024 * MIB) as served:
        ranks = [
            Rank(served, tensors(12, SHARED_BYTES // 12), rank=index, world_size=count)
            for index in range(count)
        ]
        for rank in ranks:
            rank.fill(seed=7)
        for rank in ranks:
            rank.offload(1)
        agent = served.client()
        used = agent.usage()["host_bytes"]
        agent.close()
        return float(sum(rank.nbytes for rank in ranks) / used)


def _small_tensors() -> tuple[Rows, Figures]:
    """A version of 10 000 tensors, one after the other, and with gaps between them."""
    rows: Rows = []
    figures: Figures = {}
    nbytes = OBJECTS * OBJECT_BYTES
    memcpy = Memcpy(nbytes)
    for name, gap in (("in_a_row", 0), ("apart", GAP_BYTES)):
        with daemon(host_bytes=2048 * MIB) as served:
            rank = Rank(served, tensors(OBJECTS, OBJECT_BYTES, apart_bytes=gap))
            rank.fill()
            seq = [0]

            def put(rank: Rank = rank, seq: list[int] = seq) -> float:
                seq[0] += 1
                return timed(lambda: rank.offload(seq[0]))

            def load(rank: Rank = rank, seq: list[int] = seq) -> float:
                return timed(lambda: rank.load(seq[0]))

            found = in_turns({"offload": put, "load": load, "memcpy": memcpy.work(2)}, ROUNDS)
        for move in ("offload", "load"):
            rate = nbytes / found.best_s(move) / GB
            figures[f"small_{name}_{move}_gb_s"] = rate
            figures[f"small_{name}_{move}_ratio"] = found.ratio(move, "memcpy")
            rows.append(
                row(
                    f"{move} of {OBJECTS} tensors of 48 KiB, {name.replace('_', ' ')}",
                    f"{rate:.1f} GB/s, {found.ratio(move, 'memcpy'):.2f}",
                    f"{found.usual_ratio(move, 'memcpy'):.2f}",
                )
            )
    return rows, figures

"""Weight sync between two hosts, beside `iperf3` on the same link in the same run.

    python -m benchmarks.weight_sync_hosts [--quick] [--json]

Each host is simulated (`tests.hosts`): network, mount, IPC and PID namespaces of its own. A trainer
on one host has published its weights; ranks of a rollout on the other one pull them at the same
time, each over a stream of its own. Two ranks have rows or columns of each tensor; one rank has
everything. `iperf3` has as many streams, and so has, beside TLS, plain `ssl.SSLSocket`
(`benchmarks.state.tls_stream`), in turns with the pulls.
"""

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.statemanager.protocol.network import TRUSTED
from tests.hosts.host import Host, HostProcess
from tests.hosts.network import hosts, why_impossible
from tests.statemanager.hosts.nodes import MIB, Node, Rank, start_nodes

GB = 1e9
TENSORS, ROWS, COLUMNS = sized((32, 1024, 2048), quick=(4, 64, 64))
MODEL = {"tensors": TENSORS, "rows": ROWS, "columns": COLUMNS}
MODEL_BYTES = TENSORS * ROWS * COLUMNS * 4
ROUNDS = sized(5, quick=1)
IPERF_S = 1
SPLITS = {"whole": None, "rows": 0, "columns": 1}
"""What each rank pulls of each tensor; the trainer has it whole."""
PORT = 5201


class Rate(NamedTuple):
    """Speed and cost of a transfer."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """CPU time of both ends."""


def main() -> None:
    """Measure both kinds of link."""
    missing = why_impossible()
    if shutil.which("iperf3") is None:
        missing = "iperf3 is missing: apt install iperf3"
    if missing:
        raise SystemExit(missing)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with hosts("trainer", "rollout", shared_memory_bytes=4 << 30) as (first, second):
        for fabric in (TRUSTED, ""):
            _measure(first, second, fabric, rows, figures)
            for host in (first, second):
                host.power_off()
                host.power_on()
    columns = (
        *("what", "GB/s", "iperf3", "ratio", "CPU s/GB", "iperf3"),
        *("of plain ssl", "ssl: CPU s/GB"),
    )
    report("Weight sync between hosts", columns, rows, figures)


def _measure(
    first: Host,
    second: Host,
    fabric: str,
    rows: list[tuple[str, ...]],
    figures: dict[str, float],
) -> None:
    kind = "tcp" if fabric else "tls"
    with tempfile.TemporaryDirectory() as folder:
        source, target = start_nodes(
            [first, second],
            Path(folder) / "authority",
            fabric=fabric,
            host_bytes=2 * MODEL_BYTES + 64 * MIB,
        )
    trainer = source.rank(deployment="job/actor", rank=0, world_size=1, split=0, **MODEL)
    trainer.do("publish", seq=1)
    for layout, split in SPLITS.items():
        streams = 1 if split is None else 2
        part = {"deployment": f"job/{layout}", "world_size": streams, "split": split, **MODEL}
        ranks = [target.rank(rank=index, **part) for index in range(streams)]
        ours, theirs, bounds = [], [], []
        for _ in range(ROUNDS + 1):
            ours.append(_pull(ranks, source, target))
            theirs.append(_iperf3(first, second, streams))
            if not fabric:
                bounds.append(_plain_tls(source, target, streams))
        for rank in ranks:
            assert rank.do("check", seq=1)["holds"], "a pull brought other bytes"
            rank.process.end()
        what = f"{kind}, {layout}, streams: {streams}"
        _compare(what, ours[1:], theirs[1:], bounds[1:], rows, figures)
    trainer.process.end()


def _compare(
    what: str,
    ours: Sequence[Rate],
    theirs: Sequence[Rate],
    bounds: Sequence[Rate],
    rows: list[tuple[str, ...]],
    figures: dict[str, float],
) -> None:
    pairs = list(zip(ours, theirs, strict=True))
    ratio = statistics.median(mine.bytes_per_s / plain.bytes_per_s for mine, plain in pairs)
    rates = [statistics.median(each.bytes_per_s for each in side) / GB for side in (ours, theirs)]
    costs = [statistics.median(each.cpu_s_per_gb for each in side) for side in (ours, theirs)]
    name = what.replace(", streams: ", "_").replace(", ", "_")
    figures |= {
        f"{name}_gb_s": rates[0],
        f"{name}_iperf3_gb_s": rates[1],
        f"{name}_ratio": ratio,
        f"{name}_cpu_s_per_gb": costs[0],
        f"{name}_iperf3_cpu_s_per_gb": costs[1],
    }
    texts = [f"{figure:.2f}" for figure in (*rates, ratio, *costs)]
    if bounds:
        of_bound = statistics.median(
            mine.bytes_per_s / plain.bytes_per_s for mine, plain in zip(ours, bounds, strict=True)
        )
        cost = statistics.median(each.cpu_s_per_gb for each in bounds)
        figures |= {f"{name}_ssl_ratio": of_bound, f"{name}_ssl_cpu_s_per_gb": cost}
        texts += [f"{of_bound:.2f}", f"{cost:.2f}"]
    rows.append((what, *texts, *[""] * (2 - 2 * bool(bounds))))


def _pull(ranks: Sequence[Rank], source: Node, target: Node) -> Rate:
    """A pull by all ranks together."""
    before = _cpu_s(source, target)
    asked = [
        rank.ask("pull", seq=1, sources=[source.address], source="job/actor") for rank in ranks
    ]
    answers = [rank.answer(number) for rank, number in zip(ranks, asked, strict=True)]
    moved = sum(answer["moved"] for answer in answers)
    assert moved == MODEL_BYTES, f"redundancy is {moved / MODEL_BYTES}, not 1.0"
    ended = max(answer["ended"] for answer in answers)
    took_s = ended - min(answer["began"] for answer in answers)
    return Rate(moved / took_s, (_cpu_s(source, target) - before) / (moved / GB))


def _cpu_s(*nodes: Node) -> float:
    """CPU time of the StateManagers and ranks of these nodes."""
    found = (process for node in nodes for process in node.host.processes("tests.statemanager"))
    daemons = (process for node in nodes for process in node.host.processes("plexrl.statemanager"))
    times = [process.cpu_times() for process in (*found, *daemons)]
    return float(sum(each.user + each.system for each in times))


def _plain_tls(source: Node, target: Node, streams: int) -> Rate:
    """As many bytes as a pull moves, over `ssl.SSLSocket`."""
    words = (source.host.address, str(PORT), str(streams), str(MODEL_BYTES))

    def side(node: Node, name: str) -> HostProcess:
        tls = node.config.tls
        assert tls is not None
        files = (tls.ca, tls.certificate, tls.key)
        return node.host.start("python", "-m", "benchmarks.state.tls_stream", name, *words, *files)

    sender = side(source, "send")
    sender.wait_for("listening")
    receiver = side(target, "receive")
    ends = [json.loads(each.wait_for("done ").removeprefix("done ")) for each in (receiver, sender)]
    for each in (receiver, sender):
        each.wait(30)
    return Rate(
        MODEL_BYTES / ends[0]["seconds"], sum(end["cpu_s"] for end in ends) / (MODEL_BYTES / GB)
    )


def _iperf3(first: Host, second: Host, streams: int) -> Rate:
    """From the first host to the second."""
    words = ("--server", "--one-off", "--forceflush", "--port", str(PORT))
    server = first.start("iperf3", *words)
    server.wait_for("listening")
    client = [
        *("iperf3", "--client", first.address, "--port", str(PORT), "--reverse", "--json"),
        *("--time", str(IPERF_S), "--parallel", str(streams)),
    ]
    end = json.loads(second.run(*client).stdout)["end"]
    server.wait(30)
    received = end["sum_received"]
    used = end["cpu_utilization_percent"]
    cpu_s = (used["host_total"] + used["remote_total"]) / 100 * received["seconds"]
    return Rate(received["bits_per_second"] / 8, cpu_s / (received["bytes"] / GB))


if __name__ == "__main__":
    main()

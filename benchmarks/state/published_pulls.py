"""Pulls of a published version by several rollout instances of one host, over a limited link.

    python -m benchmarks.state.published_pulls [--quick] [--json]

Each host is simulated (`tests.hosts`); `tc` limits the rate at which the trainer's host sends. The
instances pull each version at the same time. In turns they pull directly from the trainer's host,
from a replica that their host fetches at the pull, and from a replica that it has prefetched since
the publish. `blocked` is the time from the first request to the last end, in which the instances
cannot generate. Bytes are those that the rollouts' network interface has received.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.statemanager.protocol.network import TRUSTED
from tests.hosts.network import hosts, why_impossible
from tests.statemanager.hosts.nodes import MIB, Node, Rank, start_nodes

TENSORS, ROWS, COLUMNS = sized((32, 1024, 1024), quick=(4, 64, 64))
MODEL = {"tensors": TENSORS, "rows": ROWS, "columns": COLUMNS}
MODEL_BYTES = TENSORS * ROWS * COLUMNS * 4
ROUNDS = sized(5, quick=1)
LINK = "1gbit"
INSTANCES = {"F32": 3, "BF16": 3}
"""Instances of each dtype; the trainer's version is fp32."""
WAYS = ("direct", "replica", "prefetched")
ACTOR = "job/actor"


class Pull(NamedTuple):
    """One version, pulled by all instances."""

    blocked_s: float
    link_bytes: int


def main() -> None:
    """Measure each dtype."""
    missing = why_impossible()
    if missing:
        raise SystemExit(missing)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for dtype, count in INSTANCES.items():
        with (
            hosts("trainer", "rollout", shared_memory_bytes=4 << 30) as (first, second),
            tempfile.TemporaryDirectory() as folder,
        ):
            size = 4 * MODEL_BYTES + 64 * MIB
            source, target = start_nodes(
                [first, second], Path(folder) / "ca", fabric=TRUSTED, host_bytes=size
            )
            _measure(source, target, dtype, count, rows, figures)
    report(
        f"Pulls of {MODEL_BYTES / 1e6:.0f} MB of fp32 over {LINK}",
        ("instances", "way", "blocked s", "MB over the link", "of the direct time"),
        rows,
        figures,
    )


def _measure(
    source: Node,
    target: Node,
    dtype: str,
    count: int,
    rows: list[tuple[str, ...]],
    figures: dict[str, float],
) -> None:
    trainer = source.rank(deployment=ACTOR, **MODEL)
    fields: dict[str, Any] = {"dtype": dtype, "digests": True, **MODEL}
    ranks = [target.rank(deployment=f"job/rollout-{index}", **fields) for index in range(count)]
    source.limit_sending(LINK)
    found: dict[str, list[Pull]] = {way: [] for way in WAYS}
    seq = 0
    for _ in range(ROUNDS + 1):
        for way in WAYS:
            seq += 1
            trainer.do("publish", seq=seq)
            found[way].append(_pull(source, target, ranks, seq, way))
    direct_s = statistics.median(pull.blocked_s for pull in found["direct"][1:])
    for way, pulls in found.items():
        # The first round has no replicas: the node does not know yet what its ranks pull.
        blocked_s = statistics.median(pull.blocked_s for pull in pulls[1:])
        link_bytes = statistics.median(pull.link_bytes for pull in pulls[1:])
        name = f"{dtype.lower()}_{way}"
        figures |= {f"{name}_blocked_s": blocked_s, f"{name}_link_bytes": link_bytes}
        figures[f"{name}_redundancy"] = link_bytes / MODEL_BYTES
        texts = (f"{blocked_s:.2f}", f"{link_bytes / 1e6:.0f}", f"{blocked_s / direct_s:.2f}")
        rows.append((f"{count} of {dtype.lower()}", way, *texts))
    for rank in (trainer, *ranks):
        rank.process.end()


def _pull(source: Node, target: Node, ranks: Sequence[Rank], seq: int, way: str) -> Pull:
    before = target.received_bytes()
    place: dict[str, Any] = {"seq": seq, "sources": [source.address], "source": ACTOR}
    if way == "prefetched" and seq > len(WAYS):
        ranks[0].do("prefetch", **place)
    asked = [rank.ask("pull", replicate=way != "direct", **place) for rank in ranks]
    answers = [rank.answer(number) for rank, number in zip(ranks, asked, strict=True)]
    assert len({answer["digest"] for answer in answers}) == 1, "instances hold different bytes"
    if ranks[0].setup.dtype == "F32":
        assert all(rank.do("check", seq=seq)["holds"] for rank in ranks), "a pull brought others"
    blocked_s = max(each["ended"] for each in answers) - min(each["began"] for each in answers)
    return Pull(blocked_s, target.received_bytes() - before)


if __name__ == "__main__":
    main()

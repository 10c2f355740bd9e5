"""Weight sync between two hosts by delta and in full, over links of several speeds.

    python -m benchmarks.delta_sync_hosts [--quick] [--json]

The hosts are simulated (`tests.hosts`), and `tc` limits the rate at which the trainer's host sends.
The versions are those of consecutive AdamW steps of a transformer in fp32; the rollout has bf16.
Three ranks pull each version in turns: in full, by delta, and as "auto" chooses. All must have the
same bits. All times are medians of the steps after the trials of "auto".
"""

import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.statemanager.protocol.network import TRUSTED
from plexrl.statemanager.transfer.delta.pace import TRIALS
from tests.hosts.host import Host
from tests.hosts.network import hosts, why_impossible
from tests.statemanager.hosts.nodes import MIB, Node, Rank, start_nodes

RATES = sized(("1gbit", "10gbit", "25gbit"), quick=("1gbit",))
LEARNING_RATES = sized((1e-6,), quick=(1e-5,))
STEPS = sized(12, quick=2 * TRIALS)
UNCOUNTED = sized(3, quick=1)
"""Optimizer steps before the first version: AdamW's first ones are larger."""
WIDTH, LAYERS, WORDS = sized((512, 5, 512), quick=(128, 1, 64))

MODES: dict[str, bool | str] = {"full": False, "delta": True, "auto": "auto"}

Versions = list[npt.NDArray[np.float32]]


def main() -> None:
    """Measure each link at each rate."""
    missing = why_impossible()
    if missing:
        raise SystemExit(missing)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for learning_rate in LEARNING_RATES:
        versions = train(learning_rate)
        with hosts("trainer", "rollout", shared_memory_bytes=2 << 30) as (first, second):
            for fabric in (TRUSTED, ""):
                _measure((first, second), fabric, learning_rate, versions, rows, figures)
                for host in (first, second):
                    host.power_off()
                    host.power_on()
    columns = (
        *("what", "full", "delta", "full / delta", "bytes of the delta"),
        *("auto", "auto / better one", "auto chose"),
    )
    report("Delta sync between hosts", columns, rows, figures)


def train(learning_rate: float) -> Versions:
    """[version] all parameters, flat, after consecutive optimizer steps."""
    import torch

    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True)
    body = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = torch.nn.Sequential(
        torch.nn.Embedding(WORDS, WIDTH), body, torch.nn.Linear(WIDTH, WORDS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    versions: Versions = []
    for step in range(UNCOUNTED + STEPS + 1):
        tokens = torch.randint(WORDS, (8, 33))
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= UNCOUNTED:
            parts = [parameter.detach().reshape(-1) for parameter in model.parameters()]
            flat = torch.cat(parts).numpy()
            # As many whole rows as the tensors of the benchmark have.
            versions.append(flat[: len(flat) // (8 * WIDTH) * 8 * WIDTH].copy())
    return versions


def _measure(
    both: tuple[Host, Host],
    fabric: str,
    learning_rate: float,
    versions: Versions,
    rows: list[tuple[str, ...]],
    figures: dict[str, float],
) -> None:
    model = {"tensors": 8, "rows": len(versions[0]) // (8 * WIDTH), "columns": WIDTH}
    with tempfile.TemporaryDirectory() as folder:
        source, target = start_nodes(
            both,
            Path(folder) / "authority",
            fabric=fabric,
            host_bytes=8 * versions[0].nbytes + 64 * MIB,
        )
    trainer = source.rank(deployment="job/actor", **model)
    fields = {"dtype": "BF16", "digests": True, **model}
    seq = 0
    for rate in RATES:
        source.limit_sending(rate)
        ranks = {name: target.rank(deployment=f"job/{name}", **fields) for name in MODES}
        pulls: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
        for index, version in enumerate(versions):
            seq += 1
            _publish(trainer, source, version, seq)
            names = list(MODES)
            # The first pull of a version finds it in no cache.
            for name in names[index % len(names) :] + names[: index % len(names)]:
                pulls[name].append(_pull(ranks[name], source, seq, delta=MODES[name]))
            digests = {found[-1]["digest"] for found in pulls.values()}
            assert len(digests) == 1, "a delta brought other bytes"
        for rank in ranks.values():
            rank.process.end()
        kind = "tcp" if fabric else "tls"
        _compare(f"{kind}, {rate}, learning rate {learning_rate:.0e}", pulls, rows, figures)
    trainer.process.end()


def _compare(
    what: str,
    pulls: Mapping[str, Sequence[Mapping[str, Any]]],
    rows: list[tuple[str, ...]],
    figures: dict[str, float],
) -> None:
    """Add the figures of one link."""
    settled = {name: found[2 * TRIALS :] for name, found in pulls.items()}
    full_s, delta_s, auto_s = (
        statistics.median(each["ended"] - each["began"] for each in settled[name]) for name in MODES
    )
    fraction = statistics.median(each["moved"] / each["wanted"] for each in settled["delta"])
    [(chosen, count)] = Counter(each["mode"] for each in settled["auto"]).most_common(1)
    name = what.replace(", learning rate ", "_").replace(", ", "_").replace("-0", "m")
    figures |= {
        f"{name}_full_s": full_s,
        f"{name}_delta_s": delta_s,
        f"{name}_auto_s": auto_s,
        f"{name}_gain": full_s / delta_s,
        f"{name}_auto_loss": auto_s / min(full_s, delta_s),
        f"{name}_fraction": fraction,
    }
    times = [f"{seconds * 1e3:.0f} ms" for seconds in (full_s, delta_s, auto_s)]
    gain, loss = f"{full_s / delta_s:.2f}", f"{auto_s / min(full_s, delta_s):.2f}"
    choice = f"{chosen} ({count} of {len(settled['auto'])})"
    rows.append((what, *times[:2], gain, f"{fraction:.1%}", times[2], loss, choice))


def _publish(trainer: Rank, source: Node, version: npt.NDArray[np.float32], seq: int) -> None:
    inside = "/root/version.bin"
    version.tofile(source.host.path(inside))
    trainer.do("publish", seq=seq, file=inside)


def _pull(rank: Rank, source: Node, seq: int, *, delta: bool | str) -> dict[str, Any]:
    sources = [source.address]
    return rank.do("pull", seq=seq, sources=sources, source="job/actor", delta=delta)


if __name__ == "__main__":
    main()

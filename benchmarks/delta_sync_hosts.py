"""Weight sync between two hosts by delta and in full, over links of several speeds.

    python -m benchmarks.delta_sync_hosts [--quick] [--json]

The hosts are simulated (`tests.hosts`), and `tc` limits the rate at which the trainer's host sends.
The versions are those of consecutive AdamW steps of a transformer in fp32; the rollout has bf16.
Every pull by delta is compared with the pull in full, bit for bit.
"""

import statistics
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.statemanager.protocol.network import TRUSTED
from tests.hosts.host import Host
from tests.hosts.network import hosts, why_impossible
from tests.statemanager.hosts.nodes import MIB, Node, Rank, start_nodes

RATES = sized(("1gbit", "10gbit", "25gbit"), quick=("1gbit",))
LEARNING_RATES = sized((1e-6,), quick=(1e-5,))
STEPS = sized(12, quick=1)
UNCOUNTED = sized(3, quick=1)
"""Optimizer steps before the first version: AdamW's first ones are larger."""
WIDTH, LAYERS, WORDS = sized((512, 5, 512), quick=(128, 1, 64))

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
    columns = ("what", "full", "delta", "full / delta (medians)", "bytes of the delta")
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
    full, delta = (target.rank(deployment=f"job/{name}", **fields) for name in ("full", "delta"))
    seq = 0
    for rate in RATES:
        source.limit_sending(rate)
        seconds: dict[str, list[float]] = {"full": [], "delta": []}
        sent: list[float] = []
        for index, version in enumerate(versions):
            seq += 1
            _publish(trainer, source, version, seq)
            whole = _pull(full, source, seq, delta=False)
            changes = _pull(delta, source, seq, delta=index > 0)
            assert changes["digest"] == whole["digest"], "a delta brought other bytes"
            if index:
                for name, found in (("full", whole), ("delta", changes)):
                    seconds[name].append(found["ended"] - found["began"])
                sent.append(changes["moved"] / changes["wanted"])
        # The best of each: other work on the machine delays the computing of a delta most.
        full_s, delta_s = (min(seconds[name]) for name in ("full", "delta"))
        usual = statistics.median(seconds["full"]) / statistics.median(seconds["delta"])
        kind = "tcp" if fabric else "tls"
        name = f"{kind}_{rate}_{learning_rate:.0e}".replace("-0", "m")
        figures |= {
            f"{name}_full_s": full_s,
            f"{name}_delta_s": delta_s,
            f"{name}_gain": full_s / delta_s,
            f"{name}_gain_usual": usual,
            f"{name}_fraction": statistics.median(sent),
        }
        rows.append(
            (
                f"{kind}, {rate}, learning rate {learning_rate:.0e}",
                f"{full_s * 1e3:.0f} ms",
                f"{delta_s * 1e3:.0f} ms",
                f"{full_s / delta_s:.2f} ({usual:.2f})",
                f"{statistics.median(sent):.1%}",
            )
        )


def _publish(trainer: Rank, source: Node, version: npt.NDArray[np.float32], seq: int) -> None:
    inside = "/root/version.bin"
    version.tofile(source.host.path(inside))
    trainer.do("publish", seq=seq, file=inside)


def _pull(rank: Rank, source: Node, seq: int, *, delta: bool) -> dict[str, float]:
    sources = [source.address]
    return rank.do("pull", seq=seq, sources=sources, source="job/actor", delta=delta)


if __name__ == "__main__":
    main()

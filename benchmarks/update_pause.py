"""How long an update of the weights keeps a rollout from drawing tokens, over a limited link.

    python -m benchmarks.update_pause [--quick] [--json]

Trainer and rollout are workers of a cluster, each on a simulated host of its own (`tests.hosts`);
`tc` limits the rate at which the trainer's host sends. While samples are drawn, the trainer makes a
step, and the rollout gets the new weights between two tokens: first directly from the trainer's
host, as `sync_weights(actor, in_flight=True)` does, and then, with `published=True`, from its own
host, which has fetched the version meanwhile.

`pause` and `transfer` are `pause_s` and `transfer_s` of the syncs' results: no token can be drawn
in the first, and tokens are drawn in the second. The share is `pause / (pause + transfer)`. The
longest gap is between two tokens that reach the controller around an update: it has the pause and
the recomputation of the KV cache. Medians over the updates after the first one of each way.
"""

import json
import statistics
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import plexrl
from benchmarks.report import report
from benchmarks.sizes import QUICK, sized
from tests.hosts.cluster import HostCluster
from tests.hosts.network import hosts, why_impossible

HIDDEN, LAYERS = sized((256, 4), quick=(64, 1))
VOCABULARY = "".join(map(chr, range(0x4E00, 0x4E00 + 60)))
MODEL = plexrl.tiny_qwen2(VOCABULARY, hidden=HIDDEN, layers=LAYERS)
RATE = "50mbit"
UPDATES = sized(5, quick=1)
SAMPLES, AT_ONCE, TOKENS = 400, 2, 480
"""More samples than are drawn until the update is over; the rest is interrupted."""
BEFORE_TOKENS = 20
"""Drawn before the trainer makes its step."""
AFTER_S = sized(1.0, quick=0.2)
"""Time after an update in which a gap still counts."""
WAYS = {"direct": False, "fetched before": True}
"""Whether the pull is of a published version."""
CONTROL = "--control"
"""Runs the controller; for the benchmark itself."""
LIMIT_S = 300.0
Plain = dict[str, Any]


class Reader(threading.Thread):
    """Reads a stream of tokens."""

    def __init__(self, future: plexrl.GenerateFuture) -> None:
        super().__init__(daemon=True)
        self._future = future
        self.times: list[float] = []
        """When tokens came."""
        self.tokens = 0

    def run(self) -> None:
        for chunk in self._future.stream():
            self.times.append(time.perf_counter())
            self.tokens += len(chunk.tokens)

    def gap_s(self, since: float) -> float:
        """The longest time without tokens since then."""
        times = [since, *(each for each in self.times if each > since)]
        return max(after - before for before, after in pairwise(times))


def control() -> None:
    """Tell `ready`, wait for a line, and tell what each update took."""
    with plexrl.connect() as cluster, cluster.create_job("updates") as job:
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout_deployment("rollout", MODEL, max_concurrent_samples=AT_ONCE)
        rollout.sync_weights(actor).result(LIMIT_S)
        _tell("ready")
        sys.stdin.readline()
        for way, published in WAYS.items():
            for _ in range(UPDATES + 1):
                found = update(actor, rollout, published=published)
                _tell(json.dumps({"way": way, **found}))
        _tell("done")


def update(
    actor: plexrl.TrainDeployment, rollout: plexrl.RolloutDeployment, *, published: bool
) -> Plain:
    """One update while samples are drawn."""
    sampling = plexrl.SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
    future = rollout.generate([[3, 4, 5]], n=SAMPLES, sampling=sampling, stream=True)
    reader = Reader(future)
    reader.start()
    while reader.tokens < BEFORE_TOKENS:
        time.sleep(0.01)
    batch = plexrl.Batch([[3, 4, 5, 6]], {"mask": [[1.0] * 4]})
    actor.forward_backward(batch, plexrl.losses.cross_entropy())
    step = actor.optim_step(learning_rate=1e-3).result(LIMIT_S).trainer_step
    began = time.perf_counter()
    if published:
        actor.publish().result(LIMIT_S)
    before = reader.tokens
    found = rollout.sync_weights(actor, in_flight=True, published=published, delta=False)
    result = found.result(LIMIT_S)
    meanwhile = reader.tokens - before
    assert result["trainer_step"] == step
    time.sleep(AFTER_S)
    future.interrupt(LIMIT_S)
    reader.join()
    return {
        "pause_s": result["pause_s"],
        "transfer_s": result["transfer_s"],
        "gap_s": reader.gap_s(began),
        "tokens": meanwhile,
        "bytes": result["bytes_wanted"],
    }


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Start the hosts and the cluster, and run the controller on the head."""
    missing = why_impossible()
    if missing:
        raise SystemExit(missing)
    with hosts("head", "a", "b") as network:
        cluster = HostCluster(network, gpus=1)
        words = ["--quick"] if QUICK else []
        process = cluster.head.start(
            *("python", "-m", "benchmarks.update_pause", CONTROL, *words), env=cluster.environment
        )
        process.wait_for("ready", LIMIT_S)
        trainer = network[_node_of(cluster, "actor")]
        trainer.run(
            *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", RATE, "burst", "256k", "latency", "100ms"),
        )
        process.send("go\n")
        process.wait_for("done", LIMIT_S)
        lines = [line for line in process.text().splitlines() if line.startswith("{")]
        cluster.end()
    _report([json.loads(line) for line in lines])


def _node_of(cluster: HostCluster, deployment: str) -> str:
    (job,) = cluster.ask("jobs")
    (name,) = (
        each["ranks"][0]["node"]
        for each in job["deployments"]
        if each["deployment"].endswith(f"/{deployment}")
    )
    return str(name)


def _report(updates: list[Plain]) -> None:
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for way in WAYS:
        found = [each for each in updates if each["way"] == way][1:]
        pause_s, transfer_s, gap_s, tokens = (
            statistics.median(each[name] for each in found)
            for name in ("pause_s", "transfer_s", "gap_s", "tokens")
        )
        share = pause_s / (pause_s + transfer_s)
        name = way.replace(" ", "_")
        figures |= {
            f"{name}_pause_s": pause_s,
            f"{name}_transfer_s": transfer_s,
            f"{name}_pause_share": share,
            f"{name}_gap_s": gap_s,
            f"{name}_tokens": tokens,
        }
        texts = (f"{pause_s:.3f}", f"{transfer_s:.2f}", f"{share:.1%}", f"{gap_s:.2f}")
        rows.append((way, *texts, f"{tokens:.0f}"))
    columns = ("way", "pause s", "transfer s", "pause share", "longest gap s", "tokens meanwhile")
    size = updates[0]["bytes"] / 1e6
    report(f"Updates of {size:.1f} MB of weights over {RATE}", columns, rows, figures)


if __name__ == "__main__":
    control() if CONTROL in sys.argv else main()

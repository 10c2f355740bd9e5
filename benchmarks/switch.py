"""Measures context switches between two jobs on one training group.

    python benchmarks/switch.py [--quick] [--json]

Two jobs of two workers train one batch each in turn, so that the group changes hands every time;
then one job trains as many batches alone. The difference is what sharing costs a job.
"""

import time
from typing import Any

import plexrl
from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import start_embedded

ROUNDS = sized(40, quick=4)
ROWS = sized(256, quick=8)
MODEL = plexrl.tiny_qwen2("0123456789sr=")
BATCH = plexrl.Batch.from_completions([[3, 4, 5, 6, 7, 8, 9]] * ROWS, [[4, 5, 6, 7, 8, 2]] * ROWS)


def train(actor: plexrl.TrainDeployment) -> None:
    """One step."""
    actor.forward_backward(BATCH, plexrl.losses.cross_entropy())
    actor.optim_step(learning_rate=1e-4).result()


def timed(cluster: plexrl.Cluster, actors: list[plexrl.TrainDeployment]) -> tuple[float, list[Any]]:
    """(milliseconds of a step, the operations) of `ROUNDS` steps of alternating actors."""
    rows = cluster.operations()
    while more := cluster.operations(after=rows[-1]["index"]):
        rows = more
    start = time.perf_counter()
    for index in range(ROUNDS):
        train(actors[index % len(actors)])
    step_ms = 1e3 * (time.perf_counter() - start) / ROUNDS
    return step_ms, cluster.operations(after=rows[-1]["index"])


def main() -> None:
    """Measure and print the figures."""
    embedded = start_embedded(virtual_gpus=4, pin_workers=True)
    try:
        with plexrl.connect(embedded.url, embedded.api_key) as cluster:
            jobs = [cluster.create_job(name) for name in ("one", "two")]
            actors = [job.train_deployment("actor", MODEL, workers=2) for job in jobs]
            for actor in actors * 2:
                train(actor)
            alone_ms, _ = timed(cluster, actors[:1])
            shared_ms, operations = timed(cluster, actors)
            for job in jobs:
                job.finish()
    finally:
        embedded.close()
    moves = {
        kind: percentile(
            [1e3 * (o["finished_at"] - o["started_at"]) for o in operations if o["kind"] == kind],
            50,
        )
        for kind in ("offload", "load")
    }
    rows = [
        ("step, group never changes hands", f"{alone_ms:.1f}"),
        ("step, group changes hands each time", f"{shared_ms:.1f}"),
        ("offload, as the scheduler sees it", f"{moves['offload']:.1f}"),
        ("load, as the scheduler sees it", f"{moves['load']:.1f}"),
    ]
    figures = {
        "alone_step_ms": alone_ms,
        "shared_step_ms": shared_ms,
        "shared_over_alone": shared_ms / alone_ms,
        "offload_p50_ms": moves["offload"],
        "load_p50_ms": moves["load"],
    }
    report("Context switches of a 125 000-parameter trainer", ("what", "ms"), rows, figures)


if __name__ == "__main__":
    main()

"""Compares context switches of two adapter-training jobs with those of two full-training jobs.

    python benchmarks/lora_switch.py [--quick] [--json]

Two jobs of one worker train a small batch each in turn, so that the group changes hands every time.
The model's frozen weights stay on the device and are shared; adapters and their moments move.
"""

import json

import plexrl
from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import start_embedded
from plexrl.model.spec import parameter_count
from plexrl.wire.messages.views import LoggedOperationView

ROUNDS = sized(20, quick=6)
MODEL = plexrl.tiny_qwen2("0123456789sr=", hidden=sized(512, quick=64), layers=sized(6, quick=2))
LORA = plexrl.LoraSpec(rank=8)
BATCH = plexrl.Batch.from_completions([[3, 4, 5, 6, 7, 8, 9]] * 8, [[4, 5, 6, 7, 8, 2]] * 8)


def moves(cluster: plexrl.Cluster, lora: plexrl.LoraSpec | None) -> list[LoggedOperationView]:
    """The offloads and loads of two alternating jobs, without the first ones."""
    jobs = [cluster.create_job(name) for name in ("one", "two")]
    actors = [job.train_deployment("actor", MODEL, lora=lora) for job in jobs]
    for index in range(2 * ROUNDS):
        actor = actors[index % 2]
        actor.forward_backward(BATCH, plexrl.losses.cross_entropy())
        actor.optim_step(learning_rate=1e-4).result()
    groups = {actor.status()["group"] for actor in actors}
    assert len(groups) == 1, "the two jobs were to share a group"
    found = [row for job in jobs for row in cluster.operations(job=job.job)[8:]]
    for job in jobs:
        job.finish()
    return [row for row in found if row["kind"] in ("offload", "load")]


def figures_of(rows: list[LoggedOperationView], kind: str) -> tuple[float, float]:
    """(median MB moved, median milliseconds) of the moves of one kind."""
    own = [row for row in rows if row["kind"] == kind and row["state"] == "finished"]
    moved = [json.loads(row["result_json"]).get("bytes_moved", 0) for row in own]
    times = [1e3 * ((row["finished_at"] or 0.0) - (row["started_at"] or 0.0)) for row in own]
    return percentile(moved, 50) / 1e6, percentile(times, 50)


def main() -> None:
    """Measure and print the figures."""
    embedded = start_embedded(virtual_gpus=1, pin_workers=True)
    try:
        with plexrl.connect(embedded.url, embedded.api_key) as cluster:
            measured = {"full": moves(cluster, None), "lora": moves(cluster, LORA)}
    finally:
        embedded.close()
    rows, figures = [], {}
    for what, found in measured.items():
        for kind in ("offload", "load"):
            megabytes, milliseconds = figures_of(found, kind)
            rows.append((f"{what}: {kind}", f"{megabytes:.2f}", f"{milliseconds:.1f}"))
            figures[f"{what}_{kind}_mb"] = megabytes
            figures[f"{what}_{kind}_p50_ms"] = milliseconds
    title = f"Context switches on a model of {parameter_count(MODEL) / 1e6:.1f} million parameters"
    report(title, ("what", "MB", "ms"), rows, figures)


if __name__ == "__main__":
    main()

"""Measures what layers in host memory cost and save a model that takes turns with a trainer.

    python -m benchmarks.judge_layers [--quick] [--json]

Two reference deployments of one model share a GPU with a trainer: one has all layers on the device,
the other has room for two (`layers_on_device=2`). In each round each of them runs a forward after
the trainer, so it is switched in, and then some forwards without a switch. Figures are ratios of
the second one to the first, medians over the rounds: bytes moved and seconds of the load of a
switch, device memory lent, and seconds of a forward without a switch. On a CPU node the device is
shared memory, and a copy to it costs CPU time that computation lacks.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing

import numpy as np

import plexrl
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import start_embedded

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
HIDDEN, LAYERS = sized((512, 12), quick=(64, 4))
ROUNDS, FORWARDS = sized((6, 3), quick=(1, 1))
ROWS, TOKENS = sized((8, 64), quick=(2, 16))
NAMES = ("whole", "hosted")


def main() -> None:
    """Print the figures."""
    rng = np.random.default_rng(0)
    batch = plexrl.Batch(rng.integers(3, 60, (ROWS, TOKENS)).tolist())
    with (
        closing(start_embedded()) as embedded,
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("layers") as job,
    ):
        model = plexrl.tiny_qwen2(VOCABULARY, hidden=HIDDEN, layers=LAYERS)
        actor = job.train_deployment("actor", plexrl.tiny_qwen2(VOCABULARY))
        judges = (
            job.reference_deployment(NAMES[0], model),
            job.reference_deployment(NAMES[1], model, layers_on_device=2),
        )
        for _ in range(ROUNDS + 1):
            for judge in judges:
                actor.forward(batch).result()
                results = [judge.forward(batch).result() for _ in range(1 + FORWARDS)]
                assert np.isfinite(results[0].logprobs[0]).all()
        assert len({each.status()["group"] for each in (actor, *judges)}) == 1
        seen = [_seen(job.operations(), name) for name in NAMES]
    figures = {name: seen[1][name] / seen[0][name] for name in seen[0]}
    rows = [(name, f"{figure:.3f}") for name, figure in figures.items()]
    report(
        "Layers in host memory, relative to all on the device", ("figure", "ratio"), rows, figures
    )


def _seen(operations: Sequence[Mapping[str, object]], name: str) -> Mapping[str, float]:
    """Medians of a deployment's operations, without its first round."""
    own = [each for each in operations if str(each["deployment"]).endswith(f"/{name}")]
    results = {
        kind: [json.loads(str(each["result_json"])) for each in own if each["kind"] == kind]
        for kind in ("load", "offload")
    }
    forwards = [float(str(each["compute_s"])) for each in own if each["kind"] == "forward"]
    warm = [
        seconds
        for number, seconds in enumerate(forwards[1 + FORWARDS :])
        if number % (1 + FORWARDS)
    ]
    loads = [each for each in results["load"] if each.get("bytes_moved")]
    memory = [each["memory_before"][0]["arena_bytes"] for each in results["offload"]]
    return {
        "load_bytes": statistics.median(each["bytes_moved"] for each in loads),
        "load_seconds": statistics.median(each["seconds"] for each in loads),
        "device_bytes": statistics.median(memory),
        "forward_seconds": statistics.median(warm),
    }


if __name__ == "__main__":
    main()

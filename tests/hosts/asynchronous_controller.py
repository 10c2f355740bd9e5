"""A job with an asynchronous rollout: `python asynchronous_controller.py`.

Prints `ready`, then one JSON object for each batch that it has trained: what the batch was made of,
as the trainer recorded it. A line on standard input ends it, after which it prints the rollout's
state as `end {…}`.
"""

import itertools
import json
import sys
import threading
from collections.abc import Iterator

import plexrl

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyz"
PROMPTS, SAMPLES, STALENESS = 4, 2, 1
LIMIT_S = 1800.0
STEPS_MAX = 8000
"""More than a test waits for."""


def prompts() -> Iterator[list[int]]:
    """Prompts, no two of which are alike."""
    for number in itertools.count():
        yield [3 + number // 900, 3 + number // 30 % 30, 3 + number % 30]


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def record(batch: plexrl.RolloutBatch) -> str:
    return json.dumps(
        {
            "version": batch.version,
            "numbers": batch.prompt_numbers,
            "prompts": batch.prompts,
            "sample_versions": batch.sample_versions,
            "weights": [[[w.version for w in s.weights] for s in row] for row in batch.samples],
            "tokens": [[len(s.tokens) for s in row] for row in batch.samples],
            "rewards": batch.rewards,
        }
    )


def main() -> None:
    ended = threading.Event()

    def read() -> None:
        sys.stdin.readline()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    model = plexrl.tiny_qwen2(VOCABULARY, hidden=32, layers=1)
    with plexrl.connect() as cluster, cluster.create_job("asynchronous") as job:
        actor = job.train_deployment("actor", model)
        rollout = job.rollout(
            *("rollout", model, actor),
            instances=2,
            policy=plexrl.BoundedStaleness(STALENESS),
            prompts=PROMPTS,
            samples=SAMPLES,
            sampling=plexrl.SamplingParams(max_tokens=200, seed=3, ignore_eos=True),
        )
        tell(f"ready {job.job}")
        batches = rollout.batches(prompts(), lambda _, s: float(s.tokens[0]), steps=STEPS_MAX)
        for batch in batches:
            train = plexrl.Batch.from_samples(batch.prompts, batch.samples, batch.rewards)
            actor.forward_backward(train, plexrl.losses.importance_sampling())
            step = actor.optim_step(learning_rate=1e-3).result(LIMIT_S).trainer_step
            assert step == batch.version + 1
            tell(record(batch))
            if ended.is_set():
                break
        tell(f"end {json.dumps(rollout.status())}")


if __name__ == "__main__":
    main()

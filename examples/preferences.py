"""Supervised training with a mask, then direct preference optimisation (Rafailov et al. 2023).

    python examples/preferences.py

A tiny model first learns to repeat four digits, on the answers alone: the mask leaves prompts out.
Then it learns to prefer the digits in reverse, from pairs. The reference's logprobs are those of
the model before the first preference step. Without PLEXRL_URL the script joins the cluster of this
machine, or starts an embedded one.
"""

import random

import numpy as np

import plexrl

VOCABULARY = "0123456789="
TOKENIZER = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
BETA = 0.2


def rows(digits: list[str], answers: list[str]) -> plexrl.Batch:
    """Prompts and answers; the mask counts the answers only."""
    return plexrl.Batch.from_completions(
        [TOKENIZER.encode(f"{each}=") for each in digits],
        [TOKENIZER.encode(each) for each in answers],
    )


def train(job: plexrl.Job, *, steps: int = 30, seed: int = 1) -> tuple[list[float], list[float]]:
    """The losses of the supervised steps, and those of the preference steps."""
    rng = random.Random(seed)
    model = plexrl.tiny_qwen2(VOCABULARY, seed=seed, hidden=32)
    actor = job.train_deployment("actor", model)
    digits = ["".join(rng.choice("0123456789") for _ in range(4)) for _ in range(32)]
    supervised = []
    for step in range(steps):
        trained = actor.forward_backward(rows(digits, digits), plexrl.losses.cross_entropy())
        actor.optim_step(
            learning_rate=plexrl.schedules.warm_up(
                5e-3, steps=steps, warm_up_steps=5, decay="cosine"
            )(step)
        )
        supervised.append(trained.result().metrics["loss"])
    # Rows 2k and 2k + 1 are the preferred and the other answer.
    pairs = rows(
        [each for each in digits for _ in range(2)],
        [answer for each in digits for answer in (each[::-1], each)],
    )
    mask = [[0.0] * 5 + [1.0] * 4 for _ in range(len(pairs))]
    reference = [row.tolist() for row in actor.forward(pairs).result().logprobs]
    preferences = []
    for _ in range(steps):
        logprobs = [row.tolist() for row in actor.forward(pairs).result().logprobs]
        weights = plexrl.losses.dpo_weights(logprobs, reference, mask, beta=BETA)
        actor.forward_backward(pairs.with_values("weights", weights), plexrl.losses.custom())
        actor.optim_step(learning_rate=2e-3, grad_clip_norm=1.0)
        gains = (np.array(logprobs) - np.array(reference)) @ np.array(mask[0])
        margins = BETA * (gains[::2] - gains[1::2])
        preferences.append(float(np.log1p(np.exp(-margins)).mean()))
    return supervised, preferences


def main() -> None:
    with plexrl.connect() as cluster, cluster.create_job("preferences") as job:
        supervised, preferences = train(job)
    print(f"cross-entropy {supervised[0]:.2f} → {supervised[-1]:.2f} nats per token")
    print(f"preference loss {preferences[0]:.2f} → {preferences[-1]:.2f}")


if __name__ == "__main__":
    main()

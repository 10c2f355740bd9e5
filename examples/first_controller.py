"""A first controller: from random weights a tiny model learns to sort three digits by GRPO.

    python examples/first_controller.py

It takes about a minute on two idle CPU cores. The README shows this code.
"""

import random

import numpy as np

import plexrl

STEPS, PROMPTS, SAMPLES = 150, 64, 8
tokenizer = plexrl.Tokenizer.from_vocabulary("0123456789=")
model = plexrl.tiny_qwen2("0123456789=", seed=1)
rng = random.Random(1)


def reward(answer: str, expected: str) -> float:
    """Share of correct positions; 0.0 if the answer has another length."""
    if len(answer) != len(expected):
        return 0.0
    return sum(a == b for a, b in zip(answer, expected, strict=True)) / len(expected)


with (
    plexrl.Progress(STEPS) as progress,
    plexrl.connect() as cluster,
    cluster.create_job("sort") as job,
):
    actor = job.train_deployment("actor", model)
    rollout = job.rollout_deployment("rollout", model, max_concurrent_samples=512)
    for step in range(STEPS):
        digits = ["".join(rng.choices("0123456789", k=3)) for _ in range(PROMPTS)]
        prompts = [tokenizer.encode(f"{each}=") for each in digits]
        sampling = plexrl.SamplingParams(max_tokens=3, seed=step)
        samples = rollout.generate(prompts, n=SAMPLES, sampling=sampling).result().samples
        expected = ["".join(sorted(each)) for each in digits]
        rewards = np.array(
            [
                [reward(tokenizer.decode(sample.tokens), right) for sample in group]
                for right, group in zip(expected, samples, strict=True)
            ]
        )
        spread = rewards.std(axis=1, keepdims=True) + 1e-4
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
        batch = plexrl.Batch.from_samples(prompts, samples, advantages)
        actor.forward_backward(batch, plexrl.losses.grpo(clip_high=0.28))
        learning_rate = 4e-3 * min(1.0, (step + 1) / 10) * (1.0 - 0.9 * step / STEPS)
        stepped = actor.optim_step(learning_rate=learning_rate, grad_clip_norm=1.0)
        rollout.sync_weights(actor)
        row = {"reward": rewards.mean(), "exact": (rewards == 1.0).mean()}
        row["grad_norm"] = stepped.result().metrics["grad_norm"]
        job.log(step + 1, row)
        progress.step(step + 1, row)
    saved = actor.save_checkpoint("sorted").result()
print(f"transformers.AutoModelForCausalLM.from_pretrained({saved['path']!r})")

"""RL on a verifiable task with asynchronous rollouts: generation runs ahead of training.

    python examples/asynchronous_digits.py --staleness 2 --instances 3
    python examples/asynchronous_digits.py --staleness 0  # synchronous
    python examples/asynchronous_digits.py --tail-batching 1.25  # synchronous, with tail batching

The task: answer with the digits of the prompt in ascending order. `--staleness` bounds by how many
steps the weights that drew a trained sample may be old; nothing else in the script depends on the
policy.
Without PLEXRL_URL the script joins the cluster of this machine, or starts an embedded one.
"""

import argparse
import random
import time
from collections.abc import Iterator

import numpy as np

import plexrl

VOCABULARY = "0123456789="
DIGITS = 4


def questions(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield "".join(rng.choice("0123456789") for _ in range(DIGITS))


def score(answer: str, expected: str) -> float:
    """0.5 if exact, plus 0.5 times the share of correct positions; 0 for a wrong length."""
    if len(answer) != len(expected):
        return 0.0
    right = sum(a == b for a, b in zip(answer, expected, strict=True)) / len(expected)
    return 0.5 * (answer == expected) + 0.5 * right


def warm_up(actor: plexrl.TrainDeployment, tokenizer: plexrl.Tokenizer, steps: int) -> None:
    """Supervised steps on correct answers: the policy learns the format of an answer."""
    drawn = questions(seed=0)
    for _ in range(steps):
        digits = [next(drawn) for _ in range(64)]
        prompts = [tokenizer.encode(f"{each}=") for each in digits]
        answers = [[*tokenizer.encode("".join(sorted(each))), plexrl.EOS] for each in digits]
        batch = plexrl.Batch.from_completions(prompts, answers)
        actor.forward_backward(batch, plexrl.losses.cross_entropy())
        actor.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--tail-batching", type=float, metavar="ETA")
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up-steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy: plexrl.RolloutPolicy = plexrl.BoundedStaleness(options.staleness)
    if options.tail_batching is not None:
        policy = plexrl.TailBatching(options.tail_batching)
    tokenizer = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
    model = plexrl.tiny_qwen2(VOCABULARY, seed=options.seed)

    def reward(prompt: list[int], sample: plexrl.Sample) -> float:
        digits = tokenizer.decode(prompt).removesuffix("=")
        answer = tokenizer.decode([each for each in sample.tokens if each != plexrl.EOS])
        return score(answer, "".join(sorted(digits)))

    with plexrl.connect() as cluster, cluster.create_job("asynchronous-digits") as job:
        actor = job.train_deployment("actor", model)
        warm_up(actor, tokenizer, options.warm_up_steps)
        actor.barrier().result()
        rollout = job.rollout(
            "rollout",
            model,
            actor,
            instances=options.instances,
            policy=policy,
            prompts=16,
            samples=8,
            sampling=plexrl.SamplingParams(max_tokens=DIGITS + 2, seed=options.seed),
        )
        prompts = (tokenizer.encode(f"{each}=") for each in questions(seed=options.seed + 1))
        began = time.monotonic()
        for batch in rollout.batches(prompts, reward, steps=options.steps):
            rewards = np.array(batch.rewards)
            advantages = (rewards - rewards.mean(1, keepdims=True)) / (
                rewards.std(1, keepdims=True) + 1e-4
            )
            data = plexrl.Batch.from_samples(batch.prompts, batch.samples, advantages)
            present = actor.forward(data).result().logprobs
            data = data.with_values("prox_logprobs", present)
            actor.forward_backward(data, plexrl.losses.decoupled_ppo(weight_cap=2.0))
            actor.optim_step(learning_rate=1e-3, grad_clip_norm=1.0)
            age = batch.version - np.array(batch.sample_versions)
            job.log(batch.version, {"reward/mean": rewards.mean(), "staleness/max": age.max()})
            print(
                f"step {batch.version}: reward {rewards.mean():.3f}, samples up to {age.max()} "
                f"steps old, {time.monotonic() - began:.1f} s"
            )


if __name__ == "__main__":
    main()

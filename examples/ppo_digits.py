"""PPO with a critic on one page: a tiny model learns to write sevens.

    python examples/ppo_digits.py

A sample is rewarded at its last token only, and the critic learns what each token before it is
worth. Without PLEXRL_URL the script joins the cluster of this machine, or starts an embedded one.
"""

import argparse
from dataclasses import replace

import numpy as np

import plexrl

PROMPTS, SAMPLES, TOKENS, EPOCHS = 8, 8, 8, 2
TOKENIZER = plexrl.Tokenizer.from_vocabulary("0123456789=")
SEVEN = TOKENIZER.encode("7")[0]


def train(job: plexrl.Job, *, steps: int = 20, seed: int = 1) -> list[float]:
    """The mean reward of each step: the share of sevens."""
    model = plexrl.tiny_qwen2("0123456789=", seed=seed, hidden=32, layers=1)
    actor = job.train_deployment("actor", model)
    critic = job.train_deployment("critic", replace(model, head="value"))
    rollout = job.rollout_deployment("rollout", model)
    prompts = [TOKENIZER.encode(f"{number}=") for number in range(PROMPTS)]
    history = []
    for step in range(steps):
        sampling = plexrl.SamplingParams(
            max_tokens=TOKENS, seed=1000 * seed + step, ignore_eos=True
        )
        groups = rollout.generate(prompts, n=SAMPLES, sampling=sampling).result().samples
        rows = [(p, s) for p, group in zip(prompts, groups, strict=True) for s in group]
        batch = plexrl.Batch.from_completions(
            [prompt for prompt, _ in rows],
            [sample.tokens for _, sample in rows],
            logprobs=[sample.logprobs for _, sample in rows],
        )
        values = critic.forward(batch).result().values
        assert values is not None
        # Of whole rows, as the values are: the prompt's tokens are no actions.
        mask = [[0.0] * len(p) + [1.0] * len(s.tokens) for p, s in rows]
        scores = [s.tokens.count(SEVEN) / TOKENS for _, s in rows]
        rewards = [[0.0] * (len(m) - 1) + [score] for m, score in zip(mask, scores, strict=True)]
        advantages, returns = plexrl.losses.gae(rewards, values, mask)
        every = np.concatenate(advantages)[np.concatenate(mask) > 0]
        scaled = [(row - every.mean()) / (every.std() + 1e-6) for row in advantages]
        for name, found in (("advantages", scaled), ("returns", returns), ("values", values)):
            batch = batch.with_values(name, found)
        for _ in range(EPOCHS):
            actor.forward_backward(batch, plexrl.losses.ppo())
            actor.optim_step(learning_rate=5e-3, grad_clip_norm=1.0)
            learned = critic.forward_backward(batch, plexrl.losses.value())
            critic.optim_step(learning_rate=1e-2, grad_clip_norm=1.0)
        rollout.sync_weights(actor)
        history.append(float(np.mean(scores)))
        error = learned.result().metrics["squared_error"]
        job.log(step, {"reward": history[-1], "critic/squared_error": error})
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with plexrl.connect() as cluster, cluster.create_job("ppo") as job:
        history = train(job, steps=options.steps, seed=options.seed)
    print(f"PPO: share of sevens {history[0]:.2f} → {history[-1]:.2f}")


if __name__ == "__main__":
    main()

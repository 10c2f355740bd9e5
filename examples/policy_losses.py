"""Each policy-gradient loss on one page: a tiny model learns to write sevens.

    python examples/policy_losses.py --recipe dr_grpo

A recipe is a loss, the advantages of a group's rewards, and what the step divides by. Without
PLEXRL_URL the script joins the cluster of this machine, or starts an embedded one.
"""

import argparse
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import plexrl

Rewards = npt.NDArray[np.float64]
"""`[prompts][samples]`."""
PROMPTS, SAMPLES, TOKENS = 8, 8, 8
TOKENIZER = plexrl.Tokenizer.from_vocabulary("0123456789=")
SEVEN = TOKENIZER.encode("7")[0]


def group_mean(rewards: Rewards) -> Rewards:
    centred: Rewards = rewards - rewards.mean(axis=1, keepdims=True)
    return centred


def group_normalised(rewards: Rewards) -> Rewards:
    normalised: Rewards = group_mean(rewards) / (rewards.std(axis=1, keepdims=True) + 1e-6)
    return normalised


def leave_one_out(rewards: Rewards) -> Rewards:
    return group_mean(rewards) * SAMPLES / (SAMPLES - 1)


def batch_normalised(rewards: Rewards) -> Rewards:
    normalised: Rewards = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return normalised


RECIPES: dict[str, tuple[plexrl.LossSpec, Callable[[Rewards], Rewards], float]] = {
    "ppo": (plexrl.losses.ppo(entropy_coef=0.001), batch_normalised, 1),
    "grpo": (plexrl.losses.grpo(), group_normalised, 1),
    "dr_grpo": (plexrl.losses.dr_grpo(), group_mean, PROMPTS * SAMPLES * TOKENS),
    "dapo": (plexrl.losses.dapo(), group_normalised, 1),
    "gspo": (plexrl.losses.gspo(), group_normalised, 1),
    "cispo": (plexrl.losses.cispo(), group_normalised, 1),
    "rloo": (plexrl.losses.reinforce(), leave_one_out, 1),
    "reinforce++": (plexrl.losses.reinforce(), batch_normalised, 1),
    "importance_sampling": (plexrl.losses.importance_sampling(), group_normalised, 1),
}


def train(job: plexrl.Job, recipe: str, *, steps: int = 20, seed: int = 1) -> list[float]:
    """The mean reward of each step: the share of sevens."""
    loss, advantages_of, divide_by = RECIPES[recipe]
    model = plexrl.tiny_qwen2("0123456789=", seed=seed, hidden=32, layers=1)
    actor = job.train_deployment("actor", model)
    rollout = job.rollout_deployment("rollout", model)
    prompts = [TOKENIZER.encode(f"{number}=") for number in range(PROMPTS)]
    history = []
    for step in range(steps):
        sampling = plexrl.SamplingParams(
            max_tokens=TOKENS, seed=1000 * seed + step, ignore_eos=True
        )
        samples = rollout.generate(prompts, n=SAMPLES, sampling=sampling).result().samples
        rewards = np.array([[s.tokens.count(SEVEN) / TOKENS for s in group] for group in samples])
        batch = plexrl.Batch.from_samples(prompts, samples, advantages_of(rewards))
        trained = actor.forward_backward(batch, loss)
        actor.optim_step(learning_rate=1e-2, grad_clip_norm=1.0, divide_by=divide_by)
        rollout.sync_weights(actor)
        history.append(float(rewards.mean()))
        entropy = trained.result().metrics["entropy"]
        job.log(step, {"reward": history[-1], "entropy": entropy})
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="grpo")
    recipe = parser.parse_args().recipe
    # A job's name has letters, digits, '.', '_' and '-'.
    with plexrl.connect() as cluster, cluster.create_job(recipe.replace("+", "p")) as job:
        history = train(job, recipe)
    print(f"{recipe}: share of sevens {history[0]:.2f} → {history[-1]:.2f}")


if __name__ == "__main__":
    main()

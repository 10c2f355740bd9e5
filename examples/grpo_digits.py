"""GRPO on a verifiable task, as a thin controller without torch.

    python examples/grpo_digits.py --task sort
    python examples/grpo_digits.py --task reverse --steps 50
    python examples/grpo_digits.py --backend fsdp --layout dp=1,tp=2

`--backend` and `--layout` choose how the actor is trained and split over its GPUs; the code stays
the same. Without PLEXRL_URL the script joins the cluster of this machine, or starts an embedded
one. A short supervised warm-up teaches the format of an answer; after the warm-up, the verifier's
reward is the only training signal.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import plexrl

VOCABULARY = "0123456789sr="
Rewards = npt.NDArray[np.float64]
"""`[prompts, samples]`."""


@dataclass(frozen=True)
class Task:
    """A family of prompts; each prompt has one correct answer."""

    letter: str
    digits: int
    answer: Callable[[str], str]
    warm_up_steps: int


TASKS = {
    "sort": Task("s", 5, lambda digits: "".join(sorted(digits)), warm_up_steps=40),
    "reverse": Task("r", 4, lambda digits: digits[::-1], warm_up_steps=60),
}


def is_held_out(digits: str) -> bool:
    """True for one prompt in eight: evaluation uses these prompts, training never does."""
    return sum((i + 1) * int(digit) for i, digit in enumerate(digits)) % 8 == 0


def draw_digits(task: Task, count: int, rng: random.Random, *, held_out: bool) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        digits = "".join(rng.choice("0123456789") for _ in range(task.digits))
        if is_held_out(digits) == held_out:
            found.append(digits)
    return found


def reward(answer: str, expected: str) -> float:
    """0.5 if exact, plus 0.5 times the share of correct positions; 0 for a wrong length."""
    if len(answer) != len(expected):
        return 0.0
    right = sum(a == b for a, b in zip(answer, expected, strict=True)) / len(expected)
    return 0.5 * (answer == expected) + 0.5 * right


def most_informative(rewards: Rewards, count: int) -> npt.NDArray[np.int64]:
    """Indices `[prompts, count]` of the best and worst samples of each prompt, half of each.

    Sampling costs less than training, and the extremes carry the signal: sample many, train on
    few (policy optimisation with down-sampling, arXiv 2504.13818).
    """
    order = rewards.argsort(axis=1, kind="stable")
    return np.concatenate([order[:, : count // 2], order[:, -(count - count // 2) :]], axis=1)


class Controller:
    """One job: its deployments, its data and its training loop."""

    def __init__(self, job: plexrl.Job, task: Task, options: argparse.Namespace) -> None:
        model = plexrl.tiny_qwen2(VOCABULARY, seed=options.seed)
        self.job, self.task, self.options = job, task, options
        self.tokenizer = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
        self.rng = random.Random(options.seed)
        self.actor = job.train_deployment(
            "actor",
            model,
            workers=2 if options.workers is options.layout is None else options.workers,
            parallelism=options.layout,
            backend=options.backend,
            exclusive=options.exclusive,
        )
        self.rollout = job.rollout_deployment("rollout", model, max_concurrent_samples=1024)

    def prompt(self, digits: str) -> list[int]:
        return self.tokenizer.encode(f"{self.task.letter}{digits}=")

    def generate(
        self, digits: list[str], n: int, seed: int
    ) -> tuple[list[list[int]], list[list[plexrl.Sample]], Rewards]:
        """Samples and their rewards, `[prompts][n]`."""
        sampling = plexrl.SamplingParams(max_tokens=self.task.digits + 2, seed=seed)
        prompts = [self.prompt(d) for d in digits]
        samples = self.rollout.generate(prompts, n=n, sampling=sampling).result().samples
        rewards = [
            [reward(self.text(s.tokens), self.task.answer(d)) for s in group]
            for d, group in zip(digits, samples, strict=True)
        ]
        return prompts, samples, np.array(rewards)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token != plexrl.EOS])

    def warm_up(self) -> None:
        """Supervised steps on correct answers: the policy learns the format of an answer."""
        steps = self.options.warm_up_steps
        for _ in range(self.task.warm_up_steps if steps is None else steps):
            digits = draw_digits(self.task, 64, self.rng, held_out=False)
            answers = [[*self.tokenizer.encode(self.task.answer(d)), plexrl.EOS] for d in digits]
            batch = plexrl.Batch.from_completions([self.prompt(d) for d in digits], answers)
            self.actor.forward_backward(batch, plexrl.losses.cross_entropy())
            self.actor.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)
        self.actor.barrier().result()

    def evaluate(self) -> float:
        """Mean reward of one sampled answer to each of 256 held-out prompts."""
        digits = draw_digits(self.task, 256, random.Random(0), held_out=True)
        _, _, rewards = self.generate(digits, n=1, seed=0)
        return float(rewards.mean())

    def train_step(self, step: int) -> float:
        """One cycle: generate, score, update, sync. Returns the mean reward of the samples."""
        digits = draw_digits(self.task, 32, self.rng, held_out=False)
        prompts, samples, rewards = self.generate(digits, n=32, seed=step + 1)
        chosen = most_informative(rewards, 8)
        kept = [[group[i] for i in row] for group, row in zip(samples, chosen, strict=True)]
        scores = np.take_along_axis(rewards, chosen, axis=1)
        advantages = (scores - scores.mean(1, keepdims=True)) / (
            scores.std(1, keepdims=True) + 1e-4
        )
        # If all samples of a prompt have the same score, the advantages are 0: drop the prompt.
        batch = plexrl.Batch.from_samples(prompts, kept, advantages, keep=scores.std(1) > 0.0)
        if len(batch):
            warm_in = min(1.0, (step + 1) / 10)
            decay = 1.0 - 0.9 * step / self.options.steps
            self.actor.forward_backward(batch, plexrl.losses.grpo(clip_high=0.28))
            self.actor.optim_step(learning_rate=1e-3 * warm_in * decay, grad_clip_norm=1.0)
            self.rollout.sync_weights(self.actor)
        return float(rewards.mean())

    def run(self, progress: plexrl.Progress) -> None:
        self.warm_up()
        self.rollout.sync_weights(self.actor)
        before = self.evaluate()
        progress.say(f"held-out reward {before:.3f} after the warm-up")
        self.job.log(0, {"eval/reward": before, "steps": self.options.steps})
        for step in range(self.options.steps):
            row = {"reward/mean": self.train_step(step)}
            self.job.log(step + 1, row)
            progress.step(step + 1, row)
        after = self.evaluate()
        self.job.log(self.options.steps, {"eval/reward": after})
        if self.options.save is not None:
            self.actor.save_checkpoint(self.options.save).result()
        progress.say(
            f"{self.options.task}: held-out reward {after:.3f} after {self.options.steps} steps"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="sort")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--warm-up-steps", type=int, default=None, help="default: the number of the task"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        help="GPUs of the actor; default: those of --layout, or 2",
    )
    parser.add_argument(
        "--backend", default=None, help="training backend of the actor: fsdp, megatron, …"
    )
    parser.add_argument(
        "--layout",
        type=plexrl.Parallelism.from_text,
        default=None,
        help="parallel layout of the actor, for example dp=1,tp=2; default: dp over its workers",
    )
    parser.add_argument(
        "--exclusive", action="store_true", help="share the GPUs of the actor with no other job"
    )
    parser.add_argument("--name", default=None, help="job name; default: the name of the task")
    parser.add_argument("--save", default=None, help="name of a checkpoint of the final weights")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    with (
        plexrl.Progress(options.steps) as progress,
        plexrl.connect() as cluster,
        cluster.create_job(options.name or options.task) as job,
    ):
        Controller(job, TASKS[options.task], options).run(progress)


if __name__ == "__main__":
    try:
        main()
    except plexrl.PlexRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")

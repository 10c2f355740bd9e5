"""On-policy distillation as a thin controller: a small student learns from a teacher's logprobs.

    python examples/distill_digits.py
    python examples/distill_digits.py --steps 100 --task reverse

The script first trains a teacher on correct answers (a real job loads one:
`plexrl.ModelSpec(path=…)`). Then the student generates answers, and the teacher computes the
logprob of each token. A token's advantage is the teacher's logprob minus the student's logprob; the
mean over samples is minus the KL divergence of student from teacher. The student sees no correct
answer after its warm-up. Without PLEXRL_URL the script joins the cluster of this machine, or starts
an embedded one.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import plexrl

VOCABULARY = "0123456789sr="
ANSWERS: dict[str, Callable[[str], str]] = {
    "sort": lambda digits: "".join(sorted(digits)),
    "reverse": lambda digits: digits[::-1],
}
DIGITS = 4


@dataclass(frozen=True)
class Rollouts:
    """Answers that the student generated, with the logprobs of student and teacher."""

    batch: plexrl.Batch
    kl: float
    """Estimate of KL(student ‖ teacher), in nats per token."""


class Controller:
    """One job: teacher, student and the loop between them."""

    def __init__(self, job: plexrl.Job, options: argparse.Namespace) -> None:
        self.job, self.options = job, options
        self.tokenizer = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
        self.rng = random.Random(options.seed)
        large = plexrl.tiny_qwen2(VOCABULARY, seed=options.seed, hidden=64)
        small = plexrl.tiny_qwen2(VOCABULARY, seed=options.seed + 1, hidden=32)
        self.teacher_trainer = job.train_deployment("teacher-trainer", large)
        self.teacher = job.reference_deployment("teacher", large)
        self.student = job.train_deployment("student", small)
        self.rollout = job.rollout_deployment("rollout", small, max_concurrent_samples=512)

    def draw_digits(self, count: int, rng: random.Random) -> list[str]:
        return ["".join(rng.choice("0123456789") for _ in range(DIGITS)) for _ in range(count)]

    def prompt(self, digits: str) -> list[int]:
        return self.tokenizer.encode(f"{self.options.task[0]}{digits}=")

    def supervise(self, model: plexrl.TrainDeployment, steps: int) -> None:
        """Train `model` with cross-entropy on correct answers."""
        for _ in range(steps):
            digits = self.draw_digits(64, self.rng)
            right = [ANSWERS[self.options.task](each) for each in digits]
            answers = [[*self.tokenizer.encode(each), plexrl.EOS] for each in right]
            batch = plexrl.Batch.from_completions([self.prompt(d) for d in digits], answers)
            model.forward_backward(batch, plexrl.losses.cross_entropy())
            last = model.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)
        last.result()

    def roll_out(self, digits: list[str], n: int, seed: int) -> Rollouts:
        """Generate `n` answers to each prompt; the teacher scores them."""
        sampling = plexrl.SamplingParams(max_tokens=DIGITS + 2, seed=seed)
        prompts = [self.prompt(each) for each in digits]
        groups = self.rollout.generate(prompts, n=n, sampling=sampling).result().samples
        samples = [sample for group in groups for sample in group]
        repeated = [prompt for prompt in prompts for _ in range(n)]
        completions = [sample.tokens for sample in samples]
        rows = plexrl.Batch.from_completions(repeated, completions)
        whole = self.teacher.forward(rows).result().logprobs
        teacher_logprobs = [row[-len(each) :] for row, each in zip(whole, completions, strict=True)]
        student_logprobs = [sample.logprobs for sample in samples]
        gaps = [t - s for t, s in zip(teacher_logprobs, student_logprobs, strict=True)]
        batch = plexrl.Batch.from_completions(
            repeated, completions, logprobs=student_logprobs, advantages=gaps
        )
        return Rollouts(batch, kl=-float(np.concatenate(gaps).mean()))

    def evaluate(self) -> float:
        """KL of student from teacher over answers to a fixed set of 256 prompts."""
        return self.roll_out(self.draw_digits(256, random.Random(0)), n=1, seed=0).kl

    def train_step(self, step: int) -> float:
        """One cycle: generate, score, update, sync. Returns the KL of the answers."""
        rollouts = self.roll_out(self.draw_digits(64, self.rng), n=4, seed=step + 1)
        self.student.forward_backward(rollouts.batch, plexrl.losses.importance_sampling())
        self.student.optim_step(learning_rate=self.options.learning_rate, grad_clip_norm=1.0)
        self.rollout.sync_weights(self.student)
        return rollouts.kl

    def run(self, progress: plexrl.Progress) -> tuple[float, float]:
        """Train the teacher, then the student. Returns the KL before and after distillation."""
        self.supervise(self.teacher_trainer, self.options.teacher_steps)
        self.teacher.sync_weights(self.teacher_trainer)
        self.supervise(self.student, self.options.warm_up_steps)
        self.rollout.sync_weights(self.student)
        before = self.evaluate()
        for step in range(self.options.steps):
            row = {"kl": self.train_step(step)}
            self.job.log(step + 1, row)
            progress.step(step + 1, row)
        return before, self.evaluate()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(ANSWERS), default="sort")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--teacher-steps", type=int, default=120)
    parser.add_argument("--warm-up-steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    with (
        plexrl.Progress(options.steps) as progress,
        plexrl.connect() as cluster,
        cluster.create_job("distill") as job,
    ):
        before, after = Controller(job, options).run(progress)
    print(f"KL(student ‖ teacher): {before:.3f} → {after:.3f} nats per token")


if __name__ == "__main__":
    try:
        main()
    except plexrl.PlexRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")

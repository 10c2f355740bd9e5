"""Gemma 3 270M learns arithmetic: a short supervised phase, then GRPO with an exact-match reward.

    python -m scripts.gemma_model out/gemma
    plexrl up --virtual-gpus 2 --gpu-memory 4GiB      (with its PLEXRL_URL and PLEXRL_API_KEY)
    python examples/gemma_arithmetic.py out/gemma --seed 1
    python examples/gemma_arithmetic.py out/gemma --job JOB      (resume)

Adapters are trained on the frozen model, so two such jobs on one machine share its weights. Each
step draws its problems from the seed and its own number, so a controller that resumes a job goes on
with the problems that come next.
"""

import argparse
import random
import sys

import numpy as np
import numpy.typing as npt

import plexrl

Problem = tuple[str, str]
"""Prompt and answer."""
SAMPLES, MICRO_BATCH_TOKENS = 8, 512
"""Samples of each prompt; tokens at once, since the logits of each take a megabyte."""
LORA = plexrl.LoraSpec(rank=8, alpha=16)


def is_held_out(a: int, b: int) -> bool:
    """True for one pair in eight: the evaluation uses these, training never does."""
    return (3 * a + 5 * b) % 8 == 0


def draw(count: int, rng: random.Random, digits: int, *, held_out: bool = False) -> list[Problem]:
    """Sums and differences of numbers of that many digits."""
    found: list[Problem] = []
    while len(found) < count:
        a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        sign = rng.choice("+-")
        if is_held_out(a, b) == held_out:
            found.append((f"{a} {sign} {b} =", f" {a + b if sign == '+' else a - b}\n"))
    return found


class Controller:
    """One job: its deployments, its problems and its two phases."""

    def __init__(self, job: plexrl.Job, options: argparse.Namespace) -> None:
        model = plexrl.ModelSpec(path=options.model)
        self.job, self.options = job, options
        self.tokenizer = plexrl.Tokenizer.from_directory(options.model)
        self.actor = job.train_deployment(
            "actor",
            model,
            lora=LORA,
            max_sequence_tokens=32,
            checkpoint_every=10,
            checkpoint_keep=1,
        )
        self.rollout = job.rollout_deployment(
            "rollout", model, lora=LORA, max_sequence_tokens=32, max_concurrent_samples=64
        )
        self.steps = options.sft_steps + options.grpo_steps

    def problems(self, step: int, count: int) -> list[Problem]:
        return draw(count, random.Random(f"{self.options.seed}/{step}"), self.options.digits)

    def prompt(self, problem: Problem) -> list[int]:
        return self.tokenizer.encode(problem[0], add_special_tokens=True)

    def generate(
        self, problems: list[Problem], n: int, *, temperature: float = 1.0, seed: int = 0
    ) -> tuple[list[list[plexrl.Sample]], npt.NDArray[np.float64]]:
        """Samples and whether each is exactly the answer, `[problems][n]`."""
        params = plexrl.SamplingParams(
            max_tokens=8, stop_strings=("\n",), temperature=temperature, seed=seed
        )
        prompts = [self.prompt(problem) for problem in problems]
        samples = self.rollout.generate(prompts, n=n, sampling=params).result().samples
        exact = [
            [self.tokenizer.decode(sample.tokens).strip() == answer.strip() for sample in group]
            for (_, answer), group in zip(problems, samples, strict=True)
        ]
        return samples, np.array(exact, dtype=np.float64)

    def evaluate(self, step: int, phase: str) -> float:
        """Share of the held-out problems whose likeliest answer is exact."""
        self.rollout.sync_weights(self.actor)
        held_out = draw(self.options.eval, random.Random(0), self.options.digits, held_out=True)
        accuracy = float(self.generate(held_out, n=1, temperature=0.0)[1].mean())
        self.job.log(step, {f"accuracy/{phase}": accuracy})
        return accuracy

    def sft_step(self, step: int) -> dict[str, float]:
        """One step on right answers: the model learns when an answer ends."""
        problems = self.problems(step, self.options.sft_rows)
        answers = [self.tokenizer.encode(answer) for _, answer in problems]
        batch = plexrl.Batch.from_completions([self.prompt(each) for each in problems], answers)
        loss = plexrl.losses.cross_entropy()
        trained = self.actor.forward_backward(batch, loss, micro_batch_tokens=MICRO_BATCH_TOKENS)
        self.actor.optim_step(learning_rate=1e-3, grad_clip_norm=1.0)
        return {"sft/loss": trained.result().metrics["loss"]}

    def grpo_step(self, step: int) -> dict[str, float]:
        """One cycle: sync, generate, score, update. Only the reward says what is right."""
        self.rollout.sync_weights(self.actor)
        problems = self.problems(step, self.options.prompts)
        samples, rewards = self.generate(problems, n=SAMPLES, seed=step + 1)
        spread = rewards.std(1, keepdims=True)
        keep = spread[:, 0] > 0
        batch = plexrl.Batch.from_samples(
            [self.prompt(problem) for problem in problems],
            samples,
            (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-4),
            # Each step of the loop is one of the optimizer, from whose number a job is resumed.
            keep=keep if keep.any() else None,
        )
        loss = plexrl.losses.grpo(clip_high=0.28)
        self.actor.forward_backward(batch, loss, micro_batch_tokens=MICRO_BATCH_TOKENS)
        self.actor.optim_step(learning_rate=2e-4, grad_clip_norm=1.0)
        return {"reward": float(rewards.mean()), "trained_rows": float(len(batch))}

    def run(self, progress: plexrl.Progress) -> None:
        first_grpo = self.options.sft_steps
        done = self.job.resume_step(source=self.actor)
        if done == 0:
            progress.say(f"accuracy {self.evaluate(0, 'before'):.3f} before training")
        for step in range(done, self.steps):
            if step == first_grpo:
                progress.say(f"accuracy {self.evaluate(step, 'sft'):.3f} after {step} SFT steps")
            row = self.sft_step(step) if step < first_grpo else self.grpo_step(step)
            self.job.log(step + 1, row)
            progress.step(step + 1, row)
        progress.say(f"accuracy {self.evaluate(self.steps, 'grpo'):.3f} after {self.steps} steps")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory that scripts/gemma_model.py made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--digits", type=int, default=1, help="digits of each number")
    parser.add_argument("--sft-steps", type=int, default=30)
    parser.add_argument("--sft-rows", type=int, default=16, help="problems of a supervised step")
    parser.add_argument("--grpo-steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=8, help="problems of a GRPO step")
    parser.add_argument("--eval", type=int, default=100, help="held-out problems")
    parser.add_argument("--job", default=None, help="id of the job to resume")
    parser.add_argument("--name", default="arithmetic", help="name of a new job")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    with (
        plexrl.Progress(options.sft_steps + options.grpo_steps) as progress,
        plexrl.connect() as cluster,
        cluster.attach_job(options.job) if options.job else cluster.create_job(options.name) as job,
    ):
        Controller(job, options).run(progress)


if __name__ == "__main__":
    try:
        main()
    except plexrl.PlexRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")

"""RL with a model as the judge, which shares the trainer's GPU.

    python examples/judge_rewards.py --steps 20
    python examples/judge_rewards.py --judge reply --on-failure zero

The task: answer a digit with an even digit (`8` for `7=`). No rule grades the answers: a judge, a
model of its own, is asked `7=8?` and answers `y` or `n`, which it learns from labelled answers
first. With `--judge probability` (the default) the reward is the probability of `y`, and the judge
is on the trainer's GPU whenever that is free. With `--judge reply` the judge writes its answer, on
a GPU of its own. Without PLEXRL_URL the script joins the cluster of this machine, or starts an
embedded one.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from itertools import product

import numpy as np

import plexrl
from plexrl import rewards

VOCABULARY = "0123456789=?yn"
EVEN = tuple("02468")
LABELLED = [
    (f"{digit}={answer}?", "y" if answer in EVEN else "n")
    for digit in "0123456789"
    for answer in [*VOCABULARY, *map("".join, product(VOCABULARY, repeat=2))]
]
BATCH = 64


def taught(job: plexrl.Job, tokenizer: plexrl.Tokenizer, steps: int) -> plexrl.TrainDeployment:
    """A model that has learnt to judge answers; as many right ones as wrong ones are shown."""
    rng = random.Random(0)
    teacher = job.train_deployment("teacher", plexrl.tiny_qwen2(VOCABULARY, seed=1))
    right, wrong = ([each for each in LABELLED if each[1] == label] for label in "yn")
    for _ in range(steps):
        shown = rng.choices(right, k=BATCH) + rng.choices(wrong, k=BATCH)
        batch = plexrl.Batch.from_completions(
            [tokenizer.encode(question) for question, _ in shown],
            [[*tokenizer.encode(label), plexrl.EOS] for _, label in shown],
        )
        teacher.forward_backward(batch, plexrl.losses.cross_entropy())
        teacher.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)
    return teacher


def judge_of(
    job: plexrl.Job, kind: str, teacher: plexrl.TrainDeployment, tokenizer: plexrl.Tokenizer
) -> rewards.Judge[plexrl.Sample]:
    """The judge, with the teacher's weights."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=1)

    def ask(prompt: list[int], sample: plexrl.Sample) -> list[int]:
        written = [token for token in sample.tokens if token != plexrl.EOS]
        return [*prompt, *written, *tokenizer.encode("?")]

    def read(reply: plexrl.Sample) -> float:
        text = tokenizer.decode(reply.tokens)
        if text[:1] not in ("y", "n"):
            raise ValueError(f"the judge replied {text!r}")
        return float(text[0] == "y")

    if kind == "reply":
        writer = job.rollout_deployment("judge", model)
        writer.sync_weights(teacher)
        return writer.judge(prompt=ask, score=read)
    reader = job.reference_deployment("judge", model)
    reader.sync_weights(teacher)
    answers = [(tokenizer.encode("y"), 1.0), (tokenizer.encode("n"), 0.0)]
    return reader.judge(prompt=ask, answers=answers)


def questions(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield f"{rng.randrange(10)}="


def train(options: argparse.Namespace, job: plexrl.Job) -> None:
    tokenizer = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
    judge = judge_of(job, options.judge, taught(job, tokenizer, options.judge_steps), tokenizer)
    model = plexrl.tiny_qwen2(VOCABULARY, seed=options.seed)
    actor = job.train_deployment("actor", model)
    rollout = job.rollout(
        "rollout",
        model,
        actor,
        instances=1,
        policy=plexrl.BoundedStaleness(1),
        prompts=16,
        samples=8,
        sampling=plexrl.SamplingParams(max_tokens=2, seed=options.seed),
    )
    graded = rewards.Graded(judge.score, on_failure=options.on_failure, retries=1, at_once=64)
    prompts = (tokenizer.encode(each) for each in questions(options.seed))
    began = time.monotonic()
    for batch in rollout.batches(prompts, graded, steps=options.steps):
        found = np.array(batch.rewards)
        right = [tokenizer.decode(each.tokens) in EVEN for group in batch.samples for each in group]
        advantages = (found - found.mean(1, keepdims=True)) / (found.std(1, keepdims=True) + 1e-4)
        data = plexrl.Batch.from_samples(batch.prompts, batch.samples, advantages)
        data = data.with_values("prox_logprobs", actor.forward(data).result().logprobs)
        actor.forward_backward(data, plexrl.losses.decoupled_ppo(weight_cap=2.0))
        actor.optim_step(learning_rate=2e-3, grad_clip_norm=1.0)
        job.log(batch.version, {"reward/mean": found.mean(), "right": np.mean(right)})
        print(
            f"step {batch.version}: reward {found.mean():.3f}, right {np.mean(right):.3f}, "
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--judge", choices=("probability", "reply"), default="probability")
    parser.add_argument("--judge-steps", type=int, default=100, help="labelled batches before")
    parser.add_argument("--on-failure", choices=("drop", "zero", "raise"), default="drop")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with plexrl.connect() as cluster, cluster.create_job("judge-rewards") as job:
        train(options, job)


if __name__ == "__main__":
    try:
        main()
    except plexrl.PlexRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")

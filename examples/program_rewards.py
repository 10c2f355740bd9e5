"""RL on tiny programs: untrusted programs run in a sandbox, while others are still generated.

    python examples/program_rewards.py --steps 20
    python examples/program_rewards.py --on-failure zero --at-once 8

The task: a prompt such as `times 3` as letters (`t3`) asks for an expression in x (`x*3`). Test
cases decide; any expression that passes them is right. The sandbox needs bubblewrap and libseccomp
(`apt-get install bubblewrap libseccomp2`) and `pip install 'plexrl[rewards]'`. Without PLEXRL_URL
the script joins the cluster of this machine, or starts an embedded one.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator

import numpy as np

import plexrl
from plexrl import rewards

VOCABULARY = "0123456789ptmx+*-="
OPERATORS = {"p": "+", "t": "*", "m": "-"}
INPUTS = (2, 11)


def questions(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield f"{rng.choice('ptm')}{rng.randrange(10)}"


def answer(question: str) -> str:
    return f"x{OPERATORS[question[0]]}{question[1]}"


def tests(question: str) -> list[rewards.ProgramTest]:
    """Inputs and what a right program prints."""
    number = int(question[1])
    apply = {"p": lambda x: x + number, "t": lambda x: x * number, "m": lambda x: x - number}
    return [rewards.ProgramTest(f"{x}\n", str(apply[question[0]](x))) for x in INPUTS]


def warm_up(actor: plexrl.TrainDeployment, tokenizer: plexrl.Tokenizer, steps: int) -> None:
    """Supervised steps on answers, half of them with a wrong operator: the format is learnt."""
    rng = random.Random(0)
    drawn = questions(seed=0)
    for _ in range(steps):
        asked = [next(drawn) for _ in range(64)]
        answers = [answer(rng.choice((each, rng.choice("ptm") + each[1]))) for each in asked]
        batch = plexrl.Batch.from_completions(
            [tokenizer.encode(f"{each}=") for each in asked],
            [[*tokenizer.encode(each), plexrl.EOS] for each in answers],
        )
        actor.forward_backward(batch, plexrl.losses.cross_entropy())
        actor.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)
    actor.barrier().result()


def train(options: argparse.Namespace, job: plexrl.Job, grader: rewards.ProgramGrader) -> None:
    tokenizer = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
    model = plexrl.tiny_qwen2(VOCABULARY, seed=options.seed)
    actor = job.train_deployment("actor", model)
    warm_up(actor, tokenizer, options.warm_up_steps)
    rollout = job.rollout(
        "rollout",
        model,
        actor,
        instances=options.instances,
        policy=plexrl.BoundedStaleness(options.staleness),
        prompts=8,
        samples=8,
        sampling=plexrl.SamplingParams(max_tokens=5, seed=options.seed),
    )

    def reward(prompt: list[int], sample: plexrl.Sample) -> rewards.Grade:
        question = tokenizer.decode(prompt).removesuffix("=")
        text = tokenizer.decode([each for each in sample.tokens if each != plexrl.EOS])
        return grader.grade(f"x = int(input())\nprint({text})\n", tests(question))

    graded = rewards.Graded(reward, on_failure=options.on_failure, at_once=options.at_once)
    prompts = (tokenizer.encode(f"{each}=") for each in questions(seed=options.seed + 1))
    began = time.monotonic()
    for batch in rollout.batches(prompts, graded, steps=options.steps):
        found = np.array(batch.rewards)
        advantages = (found - found.mean(1, keepdims=True)) / (found.std(1, keepdims=True) + 1e-4)
        data = plexrl.Batch.from_samples(batch.prompts, batch.samples, advantages)
        data = data.with_values("prox_logprobs", actor.forward(data).result().logprobs)
        actor.forward_backward(data, plexrl.losses.decoupled_ppo(weight_cap=2.0))
        actor.optim_step(learning_rate=2e-3, grad_clip_norm=1.0)
        job.log(batch.version, {"reward/mean": found.mean()})
        print(
            f"step {batch.version}: reward {found.mean():.3f}, {time.monotonic() - began:.1f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up-steps", type=int, default=40)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--on-failure", choices=("drop", "zero", "raise"), default="drop")
    parser.add_argument("--at-once", type=int, default=None, help="default: twice the CPUs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with (
        rewards.Sandbox() as sandbox,
        plexrl.connect() as cluster,
        cluster.create_job("program-rewards") as job,
    ):
        train(options, job, rewards.ProgramGrader(sandbox))


if __name__ == "__main__":
    try:
        main()
    except plexrl.PlexRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")

"""RL over several turns: a tiny model learns to call a calculator, and to answer with its result.

    python examples/tool_turns.py --seed 1

A question is `3*4:`. A reply that ends with `?` calls the calculator, and the model reads what it
returns; the first reply without a call is the answer. The warm-up shows a call with
another operator in a third of all cases, so the model has to find out that the question's own is
right. Without PLEXRL_URL the script joins the
cluster of this machine, or starts an embedded one.
"""

import argparse
import random
import time

import numpy as np

import plexrl
from plexrl import environments

VOCABULARY = "0123456789+-*:?! "
TASKS, SAMPLES = 32, 8
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--warm-up-steps", type=int, default=120)
parser.add_argument("--stall", type=float, default=0.0, help="seconds that the tool takes")
options = parser.parse_args()
tokenizer = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
model = plexrl.tiny_qwen2(VOCABULARY, seed=options.seed)
rng = random.Random(options.seed)


def value(expression: str) -> str:
    left, operator, right = int(expression[0]), expression[1:-1], int(expression[-1])
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


def calculate(expression: str) -> str:
    """The tool: a wrong expression is an error, whose text the model cannot read."""
    time.sleep(options.stall)
    return f"{value(expression)}!"


def read_calls(reply: str) -> list[environments.ToolCall]:
    expression, call, _ = reply.partition("?")
    return [environments.ToolCall("calculate", {"expression": expression})] if call else []


def draw_expression() -> str:
    return f"{rng.randrange(10)}{rng.choice('+-*')}{rng.randrange(10)}"


def environment(expression: str) -> environments.ToolEnvironment:
    right = value(expression)
    asked = environments.Task(f"{expression}:", score=lambda reply: float(reply == right))
    return environments.ToolEnvironment(asked, [calculate], read_calls=read_calls, stops=["?"])


def warm_up(actor: plexrl.TrainDeployment) -> None:
    """Supervised steps on whole trajectories, without what the tool writes."""
    for _ in range(options.warm_up_steps):
        rows, masks = [], []
        for _ in range(64):
            asked = draw_expression()
            called = f"{asked[0]}{rng.choice([asked[1], rng.choice('+-*')])}{asked[2]}"
            parts = [(f"{asked}:", 0), (f"{called}?", 1), (f"{value(called)}!", 0)]
            parts.append((value(called), 1))
            rows.append([*tokenizer.encode("".join(text for text, _ in parts)), plexrl.EOS])
            masks.append([drawn for text, drawn in parts for _ in text] + [1])
        actor.forward_backward(plexrl.Batch(rows, {"mask": masks}), plexrl.losses.cross_entropy())
        actor.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)


with plexrl.connect() as cluster, cluster.create_job("tool-turns") as job:
    actor = job.train_deployment("actor", model)
    rollout = job.rollout_deployment("rollout", model, shares_gpus=True)
    warm_up(actor)
    for step in range(options.steps):
        rollout.sync_weights(actor)
        asked = [draw_expression() for _ in range(TASKS)]
        played = environments.roll_out(
            rollout,
            [environment(each) for each in asked for _ in range(SAMPLES)],
            environments.PlainText(tokenizer),
            sampling=plexrl.SamplingParams(max_tokens=6, seed=step),
            turns_max=3,
        )
        rewards = np.array([each.reward for each in played]).reshape(TASKS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (
            rewards.std(1, keepdims=True) + 1e-4
        )
        segments = [each.segment() for each in played]
        batch = plexrl.Batch.from_segments(segments, advantages.ravel())
        actor.forward_backward(batch, plexrl.losses.grpo(clip_high=0.28))
        actor.optim_step(learning_rate=2e-3, grad_clip_norm=1.0)
        job.log(step + 1, {"reward/mean": rewards.mean()})
        print(f"step {step + 1}: reward {rewards.mean():.3f}", flush=True)

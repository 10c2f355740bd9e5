"""One job of the demo: GRPO of `examples/grpo_digits.py`, and its final weights as a checkpoint.

Prints one JSON line after each step, with the mean reward, and one at the end.
"""

import json
import sys
from typing import Any

import plexrl
from examples.grpo_digits import TASKS, Controller, parse


def tell(**row: Any) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train, and save the weights."""
    options = parse()
    with plexrl.connect() as cluster, cluster.create_job(options.task, job_id=options.task) as job:
        controller = Controller(job, TASKS[options.task], options)
        controller.warm_up()
        controller.rollout.sync_weights(controller.actor)
        tell(held_out=controller.evaluate())
        for step in range(options.steps):
            tell(step=step + 1, reward=controller.train_step(step))
        tell(held_out=controller.evaluate())
        saved = controller.actor.save_checkpoint("end").result()
        tell(checkpoint=saved["path"])


if __name__ == "__main__":
    main()

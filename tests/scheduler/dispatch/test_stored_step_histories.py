"""Random histories of jobs that share a group, with optimizers in host memory.

Workers die, routers and schedulers restart, steps are refused, answers are lost, operations are
cancelled. In the end each finished mutation is in its deployment's state exactly once, in order.
"""

import random
from collections import Counter
from contextlib import suppress

from plexrl.errors import ConflictError
from plexrl.ids import OperationId
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.operations import MUTATING, OperationKind
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.fake_wpg import is_stored_step

JOBS = ("a", "b", "c")
KINDS = ("forward_backward", "optim_step", "optim_step", "save_checkpoint", "forward")
CODES = ("conflict", "state_lost", "state_tier_full", "unavailable")
STEPS = 150


class StoredHistory:
    """One history."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.cluster = FakeCluster()
        self.cluster.start_node()
        for job in JOBS:
            self.cluster.job(job)
            self.cluster.deploy(f"{job}/actor", steps_in_host=True)
        self.cluster.settle()
        self.submitted: dict[str, list[tuple[str, OperationKind]]] = {job: [] for job in JOBS}
        self.seen: Counter[str] = Counter()
        """What happened to steps of stored states."""

    def run(self) -> None:
        whats = (
            *((self.submit, 30), (self.execute, 40), (self.pass_time, 12), (self.refuse, 4)),
            *((self.lose_answer, 4), (self.kill, 5), (self.cancel, 2), (self.restart, 2)),
        )
        kinds, weights = zip(*whats, strict=True)
        for _ in range(STEPS):
            self.chance.choices(kinds, weights)[0]()
        self.finish()

    def submit(self) -> None:
        job = self.chance.choice(JOBS)
        kind = OperationKind(self.chance.choice(KINDS))
        name = f"{job}:{len(self.submitted[job])}"
        self.submitted[job].append((name, kind))
        ends_burst = self.chance.random() < 0.3
        self.cluster.submit(name, f"{job}/actor", kind.value, ends_burst=ends_burst)

    def execute(self) -> None:
        if self.cluster.launches:
            self.cluster.launch(self.chance.choice(self.cluster.launches))
        elif self.cluster.runs:
            run = self.chance.choice(self.cluster.runs)
            self.seen["made"] += is_stored_step(run) and not self.cluster.is_out_of_date(run)
            self.cluster.execute(run)

    def pass_time(self) -> None:
        self.cluster.pass_time(self.chance.choice((0.1, 5.0, 60.0)))

    def refuse(self) -> None:
        steps = [run for run in self.cluster.refusable() if is_stored_step(run)]
        if steps:
            self.cluster.refuse(self.chance.choice(steps), self.chance.choice(CODES))
            self.seen["refused"] += 1

    def lose_answer(self) -> None:
        if self.cluster.runs:
            run = self.chance.choice(self.cluster.runs)
            self.seen["unreported"] += is_stored_step(run)
            self.cluster.execute(run, report=False)

    def kill(self) -> None:
        name = f"{self.chance.choice(JOBS)}/actor"
        running = [run for run in self.cluster.runs if run.deployment == name]
        self.seen["killed"] += any(map(is_stored_step, running))
        self.cluster.kill(name)

    def cancel(self) -> None:
        names = [name for known in self.submitted.values() for name, _ in known[-3:]]
        if names:
            # What runs cannot be cancelled.
            with suppress(ConflictError):
                self.cluster.send(
                    ev.OperationCancelled(operation=OperationId(self.chance.choice(names)))
                )

    def restart(self) -> None:
        if self.chance.random() < 0.5:
            self.cluster.lose_router()
            self.cluster.join_router()
        else:
            self.cluster.restart_scheduler(restored=self.chance.random() < 0.5)

    def finish(self) -> None:
        """Everything comes to rest; each state holds what its job was told."""
        self.cluster.settle()
        for job, known in self.submitted.items():
            mutations = [name for name, kind in known if kind in MUTATING]
            done = [name for name in mutations if self.cluster.state_of(name) == "finished"]
            self.cluster.submit(f"{job}:last", f"{job}/actor", "forward")
            self.cluster.settle()
            assert self.cluster.state_of(f"{job}:last") == "finished"
            wpg = self.cluster.wpgs[f"{job}/actor"]
            newest = wpg.versions.get(max(wpg.versions, default=0), [])
            assert (newest if wpg.device is None else wpg.device) == done, job


def test_every_mutation_is_made_once_in_order_whatever_happens_to_stored_steps() -> None:
    seen: Counter[str] = Counter()
    # Fewer may not have each of these ends.
    for seed in range(max(20, examples(40))):
        history = StoredHistory(seed)
        history.run()
        seen += history.seen
    assert all(seen[what] for what in ("made", "refused", "unreported", "killed")), seen

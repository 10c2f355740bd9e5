"""Compares optimizer steps of a host optimizer under the group's lock and on the stored state.

    python -m benchmarks.state.stored_steps [--quick] [--json]

Two jobs share a GPU. In each round one of them, with its optimizer in host memory, gets the group
for a backward and makes a step: in the same turn, or once its state is offloaded and the other job
computes. The two ways take turns. Shown are the seconds for which it had the group in a round, with
and without its context switches, and the seconds of the step, all by the cluster's own clock.
"""

import threading
import time
from collections import Counter

import plexrl
from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import start_embedded
from plexrl.model.spec import parameter_count

ROUNDS = sized(6, quick=2)
MODEL = plexrl.tiny_qwen2("0123456789sr=", hidden=sized(768, quick=64), layers=sized(4, quick=2))
SMALL = plexrl.tiny_qwen2("0123456789sr=", hidden=64, layers=2)
BATCH = plexrl.Batch.from_completions([[3, 4, 5, 6, 7]] * 4, [[4, 5, 6, 2]] * 4)
SWITCHES = ("load", "offload")


class OtherJob:
    """Computes without a pause while it is told to, in a thread of its own."""

    def __init__(self, url: str, api_key: str) -> None:
        self.computes = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, api_key))
        self._thread.start()

    def stop(self) -> None:
        """End the job."""
        self._stopped.set()
        self.computes.set()
        self._thread.join()

    def _run(self, url: str, api_key: str) -> None:
        with plexrl.connect(url, api_key) as cluster, cluster.create_job("other") as job:
            actor = job.train_deployment("actor", SMALL)
            while self.computes.wait() and not self._stopped.is_set():
                actor.forward_backward(BATCH, plexrl.losses.cross_entropy()).result(300)


def one_round(actor: plexrl.TrainDeployment, other: OtherJob, *, stored: bool) -> None:
    """A backward and a step."""
    done = actor.forward_backward(BATCH, plexrl.losses.cross_entropy())
    if stored:
        done.result(300)
        leave(actor, other)
        actor.optim_step(learning_rate=1e-4).result(300)
    else:
        actor.optim_step(learning_rate=1e-4).result(300)
        leave(actor, other)
    other.computes.clear()


def leave(actor: plexrl.TrainDeployment, other: OtherJob) -> None:
    """Have the other job compute, and wait until the actor is offloaded."""
    other.computes.set()
    while actor.status()["residency"] != "offloaded":
        time.sleep(0.01)


def seconds_by_kind(cluster: plexrl.Cluster, job: plexrl.Job, since: int) -> Counter[str]:
    """Seconds of a job's runs after the first `since` rows of its log, by kind."""
    found: Counter[str] = Counter()
    for row in cluster.operations(job=job.job)[since:]:
        if row["started_at"] is not None and row["finished_at"] is not None:
            found[row["kind"]] += row["finished_at"] - row["started_at"]  # type: ignore[assignment]
    return found


def main() -> None:
    """Measure and print the figures."""
    embedded = start_embedded(virtual_gpus=1, pin_workers=True)
    rounds: dict[str, list[Counter[str]]] = {"under the lock": [], "stored state": []}
    try:
        with (
            plexrl.connect(embedded.url, embedded.api_key) as cluster,
            cluster.create_job("stepper") as job,
        ):
            actor = job.train_deployment("actor", MODEL, optimizer="host")
            other = OtherJob(embedded.url, embedded.api_key)
            one_round(actor, other, stored=False)
            for _ in range(ROUNDS):
                for way, rows in rounds.items():
                    since = len(cluster.operations(job=job.job))
                    one_round(actor, other, stored=way == "stored state")
                    rows.append(seconds_by_kind(cluster, job, since))
            other.stop()
    finally:
        embedded.close()
    table: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for way, rows in rounds.items():
        in_turn = ["forward_backward"] + ["optim_step"] * (way == "under the lock")
        held = percentile([sum(row[kind] for kind in in_turn) for row in rows], 50)
        with_switches = percentile(
            [sum(row[kind] for kind in (*in_turn, *SWITCHES)) for row in rows], 50
        )
        step = percentile([row["optim_step"] for row in rows], 50)
        table.append((way, f"{held:.2f}", f"{with_switches:.2f}", f"{step:.2f}"))
        name = way.replace(" ", "_")
        figures |= {
            f"{name}_held_s": held,
            f"{name}_held_with_switches_s": with_switches,
            f"{name}_step_s": step,
        }
    size = f"{parameter_count(MODEL) / 1e6:.1f} million parameters"
    title = f"Steps of a host optimizer, {size}"
    columns = ("step on", "group held, s", "with switches, s", "step, s")
    report(title, columns, table, figures)


if __name__ == "__main__":
    main()

"""Compares checkpoints of an offloaded deployment, from its stored state and after a load.

    python -m benchmarks.state.stored_saves [--quick] [--json]

Two jobs share a GPU. One makes a step each second, the other one is offloaded and saves a
checkpoint in each round: at once, or after a barrier, which needs its state on the GPU. Shown are
the time until the version is pinned, and how much longer than usual a step of the busy job took.
"""

import threading
import time
from itertools import pairwise

import plexrl
from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import start_embedded
from plexrl.model.spec import parameter_count

ROUNDS = sized(4, quick=2)
PAUSE_S = 1.0
"""Between two steps of the busy job."""
MODEL = plexrl.tiny_qwen2("0123456789sr=", hidden=sized(256, quick=64), layers=sized(4, quick=2))
BATCH = plexrl.Batch.from_completions([[3, 4, 5, 6, 7, 8, 9]] * 8, [[4, 5, 6, 7, 8, 2]] * 8)


class BusyJob:
    """Makes steps until it is stopped, in a thread of its own."""

    def __init__(self, url: str, api_key: str) -> None:
        self.began: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, api_key))
        self._thread.start()

    def longest_step_s(self, since: float, until: float) -> float:
        """Of the steps that were under way between two moments."""
        steps = [(b, e) for b, e in pairwise(self.began) if e > since and b < until]
        return max(end - begin for begin, end in steps)

    def stop(self) -> None:
        """End the job."""
        self._stopped.set()
        self._thread.join()

    def _run(self, url: str, api_key: str) -> None:
        with plexrl.connect(url, api_key) as cluster, cluster.create_job("busy") as job:
            actor = job.train_deployment("actor", MODEL)
            while not self._stopped.is_set():
                self.began.append(time.monotonic())
                step(actor)
                # As for a rollout: a burst without a pause would keep the group for a minute.
                self._stopped.wait(PAUSE_S)


def step(actor: plexrl.TrainDeployment) -> None:
    """A small optimizer step."""
    actor.forward_backward(BATCH, plexrl.losses.cross_entropy())
    actor.optim_step(learning_rate=1e-4).result()


def one_round(
    actor: plexrl.TrainDeployment, busy: BusyJob, name: str, *, loads: bool
) -> tuple[float, float]:
    """(seconds until the version is pinned, seconds of the longest step of the busy job)."""
    steps = len(busy.began)
    while actor.status()["residency"] != "offloaded" or len(busy.began) < steps + 4:
        time.sleep(0.02)
    began = time.monotonic()
    if loads:
        actor.barrier()
    saving = actor.save_checkpoint(name)
    saving.pinned(300)
    pinned = time.monotonic()
    saving.result(300)
    # The switch back after a load is a part of what the save costs the other job.
    steps = len(busy.began)
    while len(busy.began) < steps + 2:
        time.sleep(0.02)
    return pinned - began, busy.longest_step_s(began, time.monotonic())


def main() -> None:
    """Measure and print the figures."""
    embedded = start_embedded(virtual_gpus=1, pin_workers=True)
    measured: dict[str, list[tuple[float, float]]] = {"stored": [], "loaded": []}
    try:
        with (
            plexrl.connect(embedded.url, embedded.api_key) as cluster,
            cluster.create_job("writer") as job,
        ):
            actor = job.train_deployment("actor", MODEL)
            step(actor)
            actor.publish().result()
            busy = BusyJob(embedded.url, embedded.api_key)
            for kind, rows in measured.items():
                for index in range(ROUNDS):
                    name = f"{kind}-{index}"
                    rows.append(one_round(actor, busy, name, loads=kind == "loaded"))
            busy.stop()
    finally:
        embedded.close()
    lengths = [end - begin for begin, end in pairwise(busy.began)]
    usual_s = percentile(lengths, 50)
    table, figures = [], {"usual_step_ms": 1e3 * usual_s}
    for kind, rows in measured.items():
        pinned_ms = 1e3 * percentile([row[0] for row in rows], 50)
        stall_ms = 1e3 * (percentile([row[1] for row in rows], 50) - usual_s)
        table.append((kind, f"{pinned_ms:.0f}", f"{stall_ms:.0f}"))
        figures |= {f"{kind}_pinned_ms": pinned_ms, f"{kind}_stall_ms": stall_ms}
    size = f"{parameter_count(MODEL) / 1e6:.1f} million parameters"
    title = f"Checkpoints of an offloaded model of {size}"
    report(title, ("state", "pinned, ms", "stall of the other job, ms"), table, figures)


if __name__ == "__main__":
    main()

"""Whatever is stopped for ever, or for longer than a cluster is patient, is named and replaced, and
a job whose rollout needs all of it trains the same weights. `test_pulse` has the same for a single
part, `test_stuck_workers` for a worker and a StateManager."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import psutil
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.process.children.restart_log import read_parts
from plexrl.process.folders.folders import Folders
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    PROMPTS,
    asynchronous,
    prompts,
    reward,
    train,
)
from tests.cluster.tools import (
    checkpoint_weights,
    has_ended,
    process_of,
    rank_process,
    wait_until,
)

pytestmark = pytest.mark.slow

STUCK_S = 8.0
STEPS = 4
STOPPED_AT = 1
PARTS = {
    "the router": ("plexrl.router", "router"),
    "the scheduler": ("plexrl.scheduler", "scheduler"),
    "the agent": ("plexrl.worker", "agent-node0"),
    "the StateManager": ("plexrl.statemanager", "statemanager-node0"),
    "the rollout service": ("plexrl.rollout", "rollout"),
}
"""Their modules, and their names in the record of restarts."""
MEETING = "rank 0, where the ranks meet"
RANKS = {MEETING: 0, "rank 1": 1}


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    running = start_embedded(
        tmp_path_factory.mktemp("stopped"), virtual_gpus=8, part_stuck_s=STUCK_S
    )
    yield running
    running.close()


def trained(
    embedded: EmbeddedCluster, meanwhile: Callable[[plexrl.TrainDeployment], object]
) -> tuple[bytes, int]:
    """(weights, incarnation of the trainer's workers) of a job that calls `meanwhile` between two
    of its steps."""
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("trained") as job,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        rollout = asynchronous(job, actor, 0)
        rows = islice(prompts(), STEPS * PROMPTS)
        for batch in rollout.batches(rows, reward, steps=STEPS):
            train(actor, batch.prompts, batch.samples, batch.rewards)
            if batch.version == STOPPED_AT:
                meanwhile(actor)
        return checkpoint_weights(actor), actor.status()["incarnation"]


@pytest.fixture(scope="module")
def undisturbed(impatient: EmbeddedCluster) -> bytes:
    return trained(impatient, lambda _: None)[0]


class Stop:
    """Stops one process, and lets it continue after `for_s`, if that is given."""

    def __init__(self, victim: psutil.Process, for_s: float | None) -> None:
        self.victim = victim
        victim.suspend()
        self._timer = threading.Timer(for_s or 0.0, self.end)
        if for_s is not None:
            self._timer.start()

    def end(self) -> None:
        """The process continues, if it still exists."""
        self._timer.cancel()
        with suppress(psutil.NoSuchProcess):
            self.victim.resume()


# `tests/faults/test_stuck_parts.py` stops each of the others for a while, with the default limit.
@pytest.mark.parametrize(
    ("what", "for_s"),
    [
        *(pytest.param(what, None, id=f"{what}, for ever") for what in (*PARTS, *RANKS)),
        pytest.param("the rollout service", 1.5 * STUCK_S, id="the rollout service, for a while"),
        pytest.param(MEETING, 1.5 * STUCK_S, id="rank 0, for a while"),
    ],
)
def test_what_is_stopped_is_named_and_replaced_and_the_weights_are_the_same(
    impatient: EmbeddedCluster, undisturbed: bytes, what: str, for_s: float | None
) -> None:
    stops: list[Stop] = []
    named = threading.Event()
    record = Folders.of(impatient.data_dir).parts_file

    def is_named() -> bool:
        if what in PARTS:
            found = read_parts(record).get(PARTS[what][1])
            return found is not None and found.stuck_since is not None
        with plexrl.connect(impatient.url, impatient.api_key) as cluster:
            conditions = cluster.status()["conditions"]
        wanted = f"rank {RANKS[what]}"
        return any(
            each["code"] == "part_stuck" and wanted in each["message"] for each in conditions
        )

    def watch() -> None:
        wait_until(is_named, f"{what} is not named")
        named.set()

    watcher = threading.Thread(target=watch, daemon=True)

    def stop(actor: plexrl.TrainDeployment) -> None:
        rank = RANKS.get(what)
        victim = (
            process_of(impatient, PARTS[what][0]) if rank is None else rank_process(actor, rank)
        )
        stops.append(Stop(victim, for_s))
        watcher.start()

    try:
        weights, incarnation = trained(impatient, stop)
        assert named.wait(60), f"{what} is not named"
        (stopped,) = stops
        wait_until(lambda: has_ended(stopped.victim), "it was not replaced")
    finally:
        for each in stops:
            each.end()
    assert weights == undisturbed
    if what in RANKS:
        assert incarnation > 1
    else:
        assert process_of(impatient, PARTS[what][0]).pid != stopped.victim.pid

    def is_well() -> bool:
        with plexrl.connect(impatient.url, impatient.api_key) as cluster:
            return not cluster.status()["conditions"]

    wait_until(is_well, "a condition stays")

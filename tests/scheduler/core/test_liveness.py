"""Nothing that the core accepts waits for ever: random histories, and the oracle that judges them.

`python -m tests.scheduler.random_history FIRST COUNT` runs as many as are wanted.
"""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import UnknownOperationError
from plexrl.ids import OperationId
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.liveness import stuck
from tests.scheduler.random_history import History


@settings(max_examples=examples(30), deadline=None, database=None)
@given(st.integers(0, 1 << 62), st.sampled_from((10, 40, 90)))
def test_every_accepted_operation_has_a_cause_to_go_on_and_ends(seed: int, steps: int) -> None:
    history = History(seed, check_part=0.2)
    history.run(steps)
    assert unfinished(history) == []


@pytest.mark.parametrize("seed", range(examples(40)))
def test_fixed_histories_end(seed: int) -> None:
    history = History(seed)
    history.run(90)
    assert unfinished(history) == []


def unfinished(history: History) -> list[OperationId]:
    """The submitted operations that a controller would still wait for."""
    found = []
    for event, _ in history.cluster.journal:
        # A refused or forgotten operation is unknown.
        if isinstance(event, ev.OperationSubmitted):
            with suppress(UnknownOperationError):
                if history.cluster.state_of(event.operation) in ("pending", "running"):
                    found.append(event.operation)
    return found


def ready_cluster() -> FakeCluster:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.settle()
    cluster.submit("o", "a/actor", "forward")
    return cluster


def test_the_oracle_finds_a_run_that_nobody_was_sent() -> None:
    cluster = ready_cluster()
    assert not stuck(cluster)
    cluster.runs.clear()
    assert stuck(cluster)


def test_the_oracle_finds_a_group_that_nobody_looks_at() -> None:
    cluster = ready_cluster()
    deployment = next(iter(cluster.core._context.state.deployments.values()))
    deployment.wpg.moving = None
    deployment.wpg.residency = Residency.OFFLOADED
    cluster.runs.clear()
    found = stuck(cluster)
    assert any(each.startswith("o ") for each in found)


def test_the_oracle_finds_a_timer_that_wakes_nobody() -> None:
    cluster = ready_cluster()
    cluster.core._context.effects.timer_at = None
    assert any("wake-up" in each for each in stuck(cluster))

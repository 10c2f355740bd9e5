"""Measurements of a WPG are used before default estimates."""

import pytest

from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.wire.operations import OperationKind


def test_a_burst_is_as_long_as_the_tokens_it_begins_with() -> None:
    estimates = Estimates(0)
    estimates.observe_burst(60.0, 1000)
    assert estimates.burst_s(500) == pytest.approx(30.0)
    assert estimates.burst_s(2000) == pytest.approx(120.0)


def test_without_tokens_a_burst_is_as_long_as_usual() -> None:
    estimates = Estimates(0)
    assert estimates.burst_s(1000) == 0.0
    estimates.observe_burst(60.0, 0)
    assert estimates.burst_s(1000) == estimates.burst_s(0) == 60.0


def test_an_operation_is_as_long_as_its_tokens() -> None:
    estimates = Estimates(0)
    estimates.observe(OperationKind.FORWARD, 1000, 10.0)
    assert estimates.operation_s(OperationKind.FORWARD, 100) == pytest.approx(1.0)
    assert estimates.operation_s(OperationKind.FORWARD, 0) == 10.0

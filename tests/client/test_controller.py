"""What a controller knows of its job's failures."""

import pytest

from plexrl.client.calls.controller import Controller
from plexrl.errors import EarlierFailureError
from plexrl.wire.messages.cluster_views import ErrorView


def failure(operation: str) -> ErrorView:
    """A failure as responses report it."""
    details = {"operation": operation, "deployment": "j/actor", "kind": "optim_step"}
    return EarlierFailureError(f"{operation} failed", **details).to_wire()


def test_a_received_failure_is_raised_unless_its_future_is_awaited() -> None:
    controller = Controller()
    controller.check()
    controller.receive_failure(failure("o1"), controller.acknowledged_count)
    with controller.waiting("o1"):
        controller.check()
    with controller.waiting("o2"), pytest.raises(EarlierFailureError, match="o1 failed"):
        controller.check()


def test_a_response_from_before_an_acknowledgement_brings_no_failure_back() -> None:
    controller = Controller()
    sent_at = controller.acknowledged_count
    controller.receive_failure(failure("o1"), sent_at)
    controller.acknowledged({"failure": None})
    # The response to a request that was sent before the acknowledgement.
    controller.receive_failure(failure("o1"), sent_at)
    controller.check()
    controller.receive_failure(failure("o2"), controller.acknowledged_count)
    with pytest.raises(EarlierFailureError, match="o2 failed"):
        controller.check()


def test_an_acknowledgement_shows_the_next_failure() -> None:
    controller = Controller()
    controller.receive_failure(failure("o1"), controller.acknowledged_count)
    controller.acknowledged({"failure": failure("o2")})
    with pytest.raises(EarlierFailureError, match="o2 failed"):
        controller.check()

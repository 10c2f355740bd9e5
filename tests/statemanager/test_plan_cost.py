"""Each rank for itself, or the node once for all: the cheaper route."""

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.plan.cost import NodeLink, choose_route

LINK = NodeLink(network_bytes_per_s=2e9, memory_bytes_per_s=10e9)


def test_replicas_have_their_bytes_brought_to_the_node_once() -> None:
    choice = choose_route([10**9] * 4, 10**9, LINK)
    assert choice.is_relayed
    assert (choice.direct_s, choice.relayed_s) == pytest.approx((2.0, 1.0))
    assert "4 ranks want 4000000000 bytes, 1000000000 different ones" in choice.reason


def test_ranks_that_want_different_bytes_pull_for_themselves() -> None:
    assert not choose_route([10**9] * 4, 4 * 10**9, LINK).is_relayed
    assert not choose_route([10**9], 10**9, LINK).is_relayed


def test_over_a_network_as_quick_as_memory_nothing_is_gained() -> None:
    quick = NodeLink(network_bytes_per_s=20e9, memory_bytes_per_s=10e9)
    assert not choose_route([10**9] * 2, 10**9, quick).is_relayed


def test_a_link_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="positive rates"):
        NodeLink(network_bytes_per_s=0)

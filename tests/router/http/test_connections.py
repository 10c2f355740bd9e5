"""Connections are bounded, and one with a request in progress is never closed."""

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import DataObject, data, sampled_from

from plexrl.router.server.connections import Connections, connections_possible
from tests.examples import examples

TOTAL, OF_ADDRESS = 5, 3


class Fake:
    """A fake connection."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_known = self.is_busy = self.is_dropped = False

    def drop(self) -> None:
        self.is_dropped = True


class ConnectionLimits(RuleBasedStateMachine):
    """Compares with a list of the connections that should be open."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = Connections(TOTAL, OF_ADDRESS)
        self.open: list[Fake] = []

    @rule(address=sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"]))
    def connect(self, address: str) -> None:
        new = Fake(address)
        before = list(self.open)
        if self.connections.admit(new, address):
            self.open.append(new)
        dropped = [each for each in before if each.is_dropped]
        assert all(not (each.is_known and each.is_busy) for each in dropped)
        strangers = [each for each in before if not each.is_known and not each.is_dropped]
        if any(each.is_known for each in dropped):
            own = [each for each in strangers if network(each) == network(new)]
            assert not own, "a stranger of that address should have gone first"
        self.open = [each for each in self.open if not each.is_dropped]

    @precondition(lambda self: self.open)
    @rule(drawn=data())
    def ask_with_a_key(self, drawn: DataObject) -> None:
        one = drawn.draw(sampled_from(self.open))
        self.connections.became_busy(one)
        self.connections.authenticated(one)
        one.is_known = one.is_busy = True

    @precondition(lambda self: any(each.is_busy for each in self.open))
    @rule(drawn=data())
    def answer(self, drawn: DataObject) -> None:
        one = drawn.draw(sampled_from([each for each in self.open if each.is_busy]))
        self.connections.became_idle(one)
        one.is_busy = False

    @precondition(lambda self: self.open)
    @rule(drawn=data())
    def disconnect(self, drawn: DataObject) -> None:
        one = drawn.draw(sampled_from(self.open))
        self.connections.lost(one)
        self.connections.lost(one)
        self.open.remove(one)

    @invariant()
    def the_bounds_hold(self) -> None:
        assert self.connections.count == len(self.open) <= TOTAL
        for address in {network(each) for each in self.open}:
            assert sum(network(each) == address for each in self.open) <= OF_ADDRESS


def network(connection: Fake) -> str:
    return connection.address.partition("::")[0]


TestConnectionLimits = ConnectionLimits.TestCase
TestConnectionLimits.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


def test_oldest_anonymous_then_longest_idle_connections_are_closed() -> None:
    connections = Connections(3, 3)
    idle, busy, stranger = Fake("a"), Fake("b"), Fake("c")
    for each in (idle, busy, stranger):
        assert connections.admit(each, each.address)
    for each in (idle, busy):
        connections.authenticated(each)
    connections.became_idle(idle)
    newer = Fake("d")
    assert connections.admit(newer, "d")
    assert stranger.is_dropped
    assert not idle.is_dropped
    connections.authenticated(newer)
    another = Fake("e")
    assert connections.admit(another, "e")
    assert idle.is_dropped
    connections.authenticated(another)
    assert not connections.admit(Fake("f"), "f")
    assert not busy.is_dropped


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(1024, 768), (20_000, 15_000), (300, 44), (100, 1)]
)
def test_some_descriptors_are_kept_for_files(descriptors: int, connections: int) -> None:
    assert connections_possible(descriptors) == connections

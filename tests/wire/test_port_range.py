"""Ports of a range are taken in turn, and never one at which another process listens."""

import socket

import pytest

from plexrl.wire.links.port_range import PortRange
from tests.free_ports import free_port

HOST = "127.0.0.1"


def address(port: int) -> str:
    return f"tls://n@{HOST}:{port}"


def test_a_port_is_taken_again_as_late_as_possible() -> None:
    first = free_port(3)
    ports = PortRange(HOST, range(first, first + 3))
    taken = [ports.take()]
    for _ in range(5):
        ports.give_back(address(taken[-1]))
        taken.append(ports.take())
    assert taken == 2 * [first, first + 1, first + 2]


def test_a_port_of_another_process_and_taken_ones_are_passed_over() -> None:
    first = free_port(3)
    ports = PortRange(HOST, range(first, first + 3))
    with socket.create_server((HOST, first + 1)):
        found = {ports.take(), ports.take()}
        assert found == {first, first + 2}
        with pytest.raises(OSError, match="widen `ports`"):
            ports.take()
    assert ports.take() == first + 1


def test_the_address_of_a_unix_socket_gives_no_port_back() -> None:
    first = free_port()
    ports = PortRange(HOST, range(first, first + 1))
    ports.take()
    ports.give_back("unix:/tmp/w.sock")
    with pytest.raises(OSError, match="widen `ports`"):
        ports.take()

"""The routers' ports."""

import socket
from pathlib import Path

from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.data_dir.ports import OUTGOING, choose_network_ports, choose_ports


def test_no_outgoing_connection_can_take_a_routers_port_between_two_starts(tmp_path: Path) -> None:
    first_outgoing = int(OUTGOING.read_text().split()[0])
    ports = choose_ports(ClusterOptions(data_dir=tmp_path, routers=3), tmp_path)
    assert len(set(ports)) == 3
    assert all(1024 <= port < first_outgoing for port in ports)
    assert choose_ports(ClusterOptions(data_dir=tmp_path, routers=3), tmp_path) == ports


def test_a_port_that_is_taken_is_replaced_by_another(tmp_path: Path) -> None:
    [port] = choose_ports(ClusterOptions(data_dir=tmp_path), tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        [replaced] = choose_ports(ClusterOptions(data_dir=tmp_path), tmp_path)
    assert replaced != port


def test_nodes_find_a_restarted_head_at_the_same_ports(tmp_path: Path) -> None:
    chosen = choose_network_ports("127.0.0.1", 0, 0, tmp_path)
    assert len(set(chosen)) == 2
    assert choose_network_ports("127.0.0.1", 0, 0, tmp_path) == chosen
    assert choose_network_ports("127.0.0.1", 8471, 0, tmp_path) == (8471, chosen[1])

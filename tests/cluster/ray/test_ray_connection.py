"""Errors of `plexrl up --ray`, and which of Ray's nodes it uses."""

import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plexrl.cluster.config.ray_options import RayOptions
from plexrl.errors import InvalidRequestError, UnavailableError
from plexrl.process.ray_connection import connect, none_usable, usable


def described(number: int, name: str = "10.0.0.9", **resources: float) -> dict[str, Any]:
    """A live node as Ray describes it."""
    return {
        "NodeID": f"{number:056x}",
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.9",
        "Alive": True,
        "Resources": {"memory": 1e9, **resources},
    }


def test_nodes_with_gpus_are_used_and_named_by_the_operator_or_by_id() -> None:
    head = described(1, CPU=8)
    named = described(2, "gpu-17", GPU=8, **{"accelerator_type:H200": 1})
    nameless = described(3, GPU=4)
    dead = {**described(4, "gpu-18", GPU=8), "Alive": False}
    found = usable([head, named, nameless, dead], None)
    assert [(node.node, node.gpus, node.resource) for node in found] == [
        ("gpu-17", 8, "GPU"),
        ("ray-000000000000", 4, "GPU"),
    ]
    assert [node.node_type for node in found] == ["h200", ""]


def test_worker_places_need_nodes_with_as_many_cpus() -> None:
    found = usable([described(1, "small", CPU=3), described(2, "large", CPU=4, GPU=1)], 4)
    assert [(node.node, node.gpus, node.resource) for node in found] == [("large", 4, "CPU")]


@pytest.mark.parametrize("name", ["gpu-17", "a/b", "../x", "n" * 40])
def test_every_node_has_a_unique_name_that_fits_a_path(name: str) -> None:
    """The ids differ in their first characters, as Ray's do."""
    ids = (7 << 200, 9 << 200)
    found = usable([described(number, name, GPU=1) for number in ids], None)
    assert len({node.node for node in found}) == len(found) == 2
    assert all("/" not in node.node and len(node.node) <= 32 for node in found)


def test_a_ray_cluster_without_usable_nodes_is_refused_with_a_remedy() -> None:
    assert "--num-gpus" in none_usable(None).message
    assert "--virtual-gpus 4" in none_usable(4).message


@pytest.mark.parametrize("address", ["ray://head:10001", "", "local"])
def test_other_kinds_of_address_are_refused(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="host:port"):
        RayOptions(address=address)


@pytest.mark.parametrize(
    "wrong",
    [
        {"places_per_node": 0},
        {"node_grace_s": -1.0},
        {"node_replace_s": float("nan")},
        {"rebuild_operations": -1},
        {"snapshot_operations": 0},
    ],
)
def test_options_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        RayOptions(address="auto", **wrong)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:nonsense", "127.0.0.1"])
def test_an_unreachable_address_is_refused_by_name(address: str) -> None:
    pytest.importorskip("ray", reason="needs plexrl[ray]")
    with pytest.raises(UnavailableError, match="ray start --head"):
        connect(address, "test")


def test_a_server_other_than_ray_is_detected() -> None:
    pytest.importorskip("ray", reason="needs plexrl[ray]")
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def answer() -> None:
            sock, _ = server.accept()
            # The client may close the connection at any moment.
            with sock, suppress(OSError):
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.recv(1024)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(UnavailableError, match="not a Ray head"):
            connect(f"{host}:{port}", "test")
        answering.join()


def command_line(
    *words: str, data_dir: Path, before: str = ""
) -> "subprocess.CompletedProcess[str]":
    program = f"{before}\nfrom plexrl.cli.app import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, "up", "--data-dir", str(data_dir), *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_ray_package_is_reported_with_what_to_install(tmp_path: Path) -> None:
    without = "import sys\nsys.modules['ray'] = None"
    done = command_line("--ray", "127.0.0.1:6379", data_dir=tmp_path, before=without)
    assert done.returncode == 1
    assert "pip install 'plexrl[ray]'" in done.stderr


def test_options_of_virtual_nodes_are_refused_with_ray(tmp_path: Path) -> None:
    done = command_line("--ray", "auto", "--nodes", "2", data_dir=tmp_path)
    assert done.returncode == 1
    assert "--nodes" in done.stderr

"""The tables of `plexrl nodes`."""

import json
from typing import Any, cast

import pytest

from plexrl.cli.cluster.nodes import show_nodes
from plexrl.cli.terminal.context import Output
from plexrl.wire.messages.cluster_views import NodeView

GIB = 1 << 30


def node(name: str, **changes: Any) -> NodeView:
    view = {
        "node": name,
        "gpus": 8,
        "gpus_reserved": 6,
        "gpu_memory_bytes": 141 * GIB,
        "host_memory_bytes": 1536 * GIB,
        "nvme_bytes": 3576 * GIB,
        "node_type": "",
        "speed": 1.0,
        "block": "",
        "fabric": "",
        "is_draining": False,
        "alive": True,
        "host": "",
        **changes,
    }
    return cast("NodeView", view)


def shown(capsys: pytest.CaptureFixture[str], nodes: list[NodeView]) -> list[str]:
    show_nodes(nodes, Output())
    return capsys.readouterr().out.splitlines()


def test_address_fabric_and_place_of_a_node_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    nodes = [
        node("gpu-0117", host="203.0.113.117", fabric="trusted", block="row1/rack3"),
        node("gpu-0118", host="gpu-0118.cluster.example", node_type="h200", is_draining=True),
    ]
    lines = shown(capsys, nodes)
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["gpu-0117", "203.0.113.117", "trusted", "-", "row1/rack3"] in rows
    assert ["gpu-0118", "gpu-0118.cluster.example", "-", "h200", "-"] in rows
    # No row is broken into a block or wrapped.
    assert len([row for row in rows if row and row[0].startswith("gpu-")]) == 4


def test_nodes_of_different_speed_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, [node("node0", speed=0.315), node("node1")])
    assert ["node0", "-", "-", "-", "-", "0.315"] in [line.split() for line in lines]


def test_nodes_of_one_machine_have_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(shown(capsys, [node("node0"), node("node1")])) == 3


def test_a_tenant_sees_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    without = node("gpu1", fabric="trusted")
    del without["host"]
    assert ["gpu1", "-", "trusted", "-", "-"] in [line.split() for line in shown(capsys, [without])]


def test_a_host_tier_shows_how_far_it_is_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wanted = 1440 * GIB
    nodes = [
        node("gpu-0117", host_prefault_bytes=wanted, host_ready_bytes=360 * GIB),
        node("gpu-0118", host_prefault_bytes=wanted, host_ready_bytes=wanted),
        node("gpu-0119"),
    ]
    lines = shown(capsys, nodes)
    assert max(map(len, lines)) <= 80
    assert ["GiB, 25%" in line for line in lines if "gpu-" in line] == [True, False, False]
    assert [line.strip() for line in lines if "ready" in line] == ["ready"]


def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node("gpu1", host="203.0.113.1")]
    show_nodes(nodes, Output(as_json=True))
    assert json.loads(capsys.readouterr().out) == nodes


def test_memory_that_no_worker_holds_is_shown_by_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = {"node": "gpu1", "gpu": 3, "pid": 4242, "nbytes": 20 * GIB, "since": 0.0}
    lines = shown(capsys, [node("gpu1", foreign_memory=[held]), node("gpu2", foreign_memory=[])])
    assert ["gpu1", "3", "4242", "20.0", "GiB"] in [line.split()[:5] for line in lines]
    assert "no workers" in "\n".join(lines)

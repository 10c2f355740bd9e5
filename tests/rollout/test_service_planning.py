"""Layouts that a rollout's instances could have, and how they get one."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

import plexrl
from plexrl.errors import UnavailableError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.parallelism import Parallelism
from plexrl.rollout.service.instances import planning
from plexrl.rollout.service.instances.planning import tensor_layouts
from plexrl.rollout.service.live_rollout import LiveRollout
from tests.rollout.test_service_membership import ORDER, ORDER_1, ScriptedCluster, reached, running

MODEL = plexrl.tiny_qwen2("abcdefgh")
"""Four heads, of which two are of keys and values."""


def view(*nodes: str, **settings: Any) -> Any:
    """A deployment with a rank on each of `nodes`."""
    spec = DeploymentSpec(
        model=MODEL, kind="rollout", backend="torch", workers=len(nodes), **settings
    )
    return {"spec_json": spec.to_json(), "ranks": [{"node": node} for node in nodes]}


@pytest.mark.parametrize(
    ("views", "sizes"),
    [
        ([view("n")], [1]),
        ([view("n", "n")], [1, 2]),
        # No more than the heads of keys and values.
        ([view("n", "n", "n", "n")], [1, 2]),
        # No group on two nodes.
        ([view("n", "m")], [1]),
        ([view("n", "n", "m", "m"), view("n", "n", "n", "n")], [1, 2]),
        ([view("n", "n", "m")], [1]),
        ([view("n", "n"), view("n")], []),
        ([view("n", "n", lora=plexrl.LoraSpec(rank=2))], [1]),
    ],
)
def test_tensor_ranks_are_on_one_node_and_have_equal_parts(
    views: list[Any], sizes: list[int]
) -> None:
    found = tensor_layouts(views)
    assert list(found) == sizes
    workers = [len(each["ranks"]) for each in views]
    assert all([layout.world_size] * len(views) == workers for layout in found.values())
    assert all(layout.tp == tp for tp, layout in found.items())


def test_sizes_without_room_for_the_longest_sequence_are_left_out() -> None:
    token = 2 * MODEL.dimensions.layers * MODEL.dimensions.kv_heads * MODEL.dimensions.head_dim * 4
    settings = {"max_sequence_tokens": 512, "kv_cache_bytes": 512 * token // 2}
    assert list(tensor_layouts([view("n", "n", **settings)])) == [2]


class Placing(ScriptedCluster):
    """A deployment gets its GPUs, which are on two nodes, after it was first asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.views = [{**view("n", "m"), "ranks": []}, view("n", "m")]

    async def deployment(self, name: str) -> Any:
        del name
        return self.views.pop(0)


def test_layouts_are_chosen_once_the_gpus_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "RETRY_S", 0.01)
    rollout = create_autospec(LiveRollout, instance=True)
    rollout.order = replace(ORDER, plans_parallelism=True)
    rollout.members, rollout.calls = [Mock(name="rollout-0")], Placing()
    # It ends, since no group of tensor ranks fits on a node.
    asyncio.run(planning.plan_parallelism(rollout))
    assert not rollout.calls.views


class Refusing(ScriptedCluster):
    """The first request for a layout fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[tuple[str, Parallelism]] = []

    async def set_parallelism(self, name: str, layout: Parallelism) -> None:
        self.layouts.append((name, layout))
        if len(self.layouts) == 1:
            raise UnavailableError("the scheduler restarts")


def test_an_instance_gets_its_layout_before_it_joins_again(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = Refusing()
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            member, layout = rollout.members[1], Parallelism(tp=2)
            member.divide(layout)
            assert member.absence is not None
            assert member.absence.reason == "its GPUs are divided in another way"
            await reached(rollout, lambda: "rollout-1:1" in rollout.instances.work)
            assert cluster.layouts == [("rollout-1", layout)] * 2
            assert ORDER_1 not in rollout.instances.work

    asyncio.run(check())

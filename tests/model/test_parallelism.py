"""Layouts: ranks and coordinates, groups, replicas, and what cannot be."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.capabilities import BACKENDS, backend_capabilities, check_layout
from plexrl.model.deployment_spec import DeploymentSpec, deployment_spec_from_json
from plexrl.model.parallelism import DENSE_AXES, EXPERT_AXES, Coordinates, Parallelism
from plexrl.model.spec import tiny_qwen2
from tests.layouts import DENSE_LAYOUTS, LAYOUTS


def test_every_rank_has_one_place_and_ranks_run_tp_cp_dp_pp() -> None:
    for layout in LAYOUTS:
        rank = 0
        for pp in range(layout.pp):
            for dp in range(layout.dp):
                for cp in range(layout.cp):
                    for tp in range(layout.tp):
                        in_stage = rank - pp * layout.dp * layout.cp * layout.tp
                        expert_dp, ep = divmod(in_stage, layout.ep)
                        assert layout.coordinates(rank) == Coordinates(
                            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, expert_dp=expert_dp
                        )
                        assert layout.rank(dp=dp, tp=tp, pp=pp, cp=cp) == rank
                        rank += 1
        assert rank == layout.world_size


@given(st.sampled_from(LAYOUTS), st.data())
def test_groups_part_the_ranks_and_differ_along_their_axes_only(
    layout: Parallelism, data: st.DataObject
) -> None:
    order = data.draw(st.sampled_from([DENSE_AXES, EXPERT_AXES]))
    axes = data.draw(st.sampled_from([c for n in range(5) for c in combinations(order, n)]))
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    size = 1
    for axis in axes:
        size *= layout.size(axis)
    assert {len(group) for group in groups} == {size}
    for group in groups:
        places = [layout.coordinates(rank) for rank in group]
        for axis in set(order) - set(axes):
            assert len({getattr(place, axis) for place in places}) == 1
        assert group == tuple(sorted(group))


def test_groups_are_those_of_megatrons_own_examples() -> None:
    sixteen = Parallelism(tp=2, pp=4, dp=2)
    assert sixteen.groups("dp") == (
        *((0, 2), (1, 3), (4, 6), (5, 7)),
        *((8, 10), (9, 11), (12, 14), (13, 15)),
    )
    assert sixteen.groups("tp") == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    assert sixteen.groups("pp") == tuple(tuple(range(first, 16, 4)) for first in range(4))
    assert Parallelism(tp=4, cp=2).groups("cp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_experts_spread_over_all_ranks_of_one_stage() -> None:
    layout = Parallelism(dp=2, cp=2, tp=2, ep=4, pp=2)
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert layout.groups("expert_dp")[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (1, 3, 5, 7) in layout.groups("dp", "cp")
    assert Parallelism(dp=4, ep=2).groups("expert_dp") == ((0, 2), (1, 3))


def test_results_count_of_the_last_stages_first_tensor_rank_once_for_each_part() -> None:
    for layout in DENSE_LAYOUTS:
        ranks = layout.output_ranks

        parts = [(layout.coordinates(rank).dp, layout.coordinates(rank).cp) for rank in ranks]
        assert parts == [(dp, cp) for dp in range(layout.dp) for cp in range(layout.cp)]
        for rank in ranks:
            assert (layout.coordinates(rank).pp, layout.coordinates(rank).tp) == (layout.pp - 1, 0)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"dp": 0}, "dp"),
        ({"tp": -2}, "tp"),
        ({"pp": 1.5}, "pp"),
        ({"cp": True}, "cp"),
        ({"ep": "2"}, "ep"),
        ({"dp": 2, "cp": 3, "ep": 4}, "ep"),
        ({"tp": 2, "ep": 3}, "ep"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_its_axis(sizes: dict[str, Any], field: str) -> None:
    with pytest.raises(LayoutError, match=rf"parallelism\.{field} is") as refused:
        Parallelism(**sizes)
    assert refused.value.details["field"] == field


def test_places_outside_of_a_layout_are_refused() -> None:
    layout = Parallelism(dp=2, tp=2)
    with pytest.raises(LayoutError, match="no rank 4"):
        layout.coordinates(4)
    with pytest.raises(LayoutError, match="no cp 1"):
        layout.rank(cp=1)
    with pytest.raises(LayoutError, match="there is no group along cp, ep"):
        layout.groups("cp", "ep")


def test_a_layout_survives_its_specification() -> None:
    model = tiny_qwen2("01")
    layout = Parallelism(dp=2, tp=2, cp=2, ep=4)
    for given_layout, meant in ((layout, layout), (None, Parallelism(dp=8))):
        spec = DeploymentSpec(
            model=model, kind="train", backend="fsdp", workers=8, parallelism=given_layout
        )
        read = deployment_spec_from_json(spec.to_json())
        assert read == spec
        assert read.layout == meant


def test_a_backend_refuses_the_axes_it_does_not_run_and_says_who_does() -> None:
    for capabilities in BACKENDS:
        check_layout(capabilities, Parallelism())
        for axis in ("dp", "tp", "pp", "cp"):
            layout = Parallelism(**{axis: 2})
            if axis in capabilities.axes:
                check_layout(capabilities, layout)
                continue
            with pytest.raises(LayoutError, match=f"does not support {axis}") as refused:
                check_layout(capabilities, layout)
            assert refused.value.details == {"field": axis, "backend": capabilities.backend}
            for rival in BACKENDS:
                if rival.kind == capabilities.kind:
                    assert f"{rival.backend}: {', '.join(rival.axes)}" in refused.value.message


def test_context_parallel_backends_pack_their_rows() -> None:
    assert all(each.packs for each in BACKENDS if "cp" in each.axes)


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    assert backend_capabilities("train").backend == "fsdp"
    with pytest.raises(InvalidRequestError, match="no backend 'torch' for a train deployment"):
        backend_capabilities("train", "torch")


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("dp=2", Parallelism(dp=2)),
        ("dp=1,tp=2", Parallelism(tp=2)),
        ("pp=3,cp=2 dp=2,ep=4", Parallelism(dp=2, pp=3, cp=2, ep=4)),
    ],
)
def test_a_layout_is_written_as_axes_and_sizes(text: str, layout: Parallelism) -> None:
    assert Parallelism.from_text(text) == layout


@pytest.mark.parametrize("text", ["", "2", "dp=", "dp=x", "dp=-1", "ddp=2", "dp=2,dp=2", "dp=2,"])
def test_a_layout_that_is_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="write dp=2,tp=2"):
        Parallelism.from_text(text)

"""The gradient norm counts every gradient on one rank, also if a rank has none to count."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.worker.state.arena_tensors import ParameterPiece
from plexrl.worker.training.megatron.state import BufferParameter, BufferPlan, MegatronState


def parameter(first: int, elements: int, *, is_counted: bool) -> BufferParameter:
    piece = ParameterPiece(
        global_shape=(elements,),
        offset=(0,),
        shape=(elements,),
        name=f"p{first}",
        start=0,
    )
    return BufferParameter(
        pieces=(piece,), first=first, last=first + elements, is_counted=is_counted
    )


def squares(parameters: Sequence[BufferParameter], share: tuple[int, int]) -> float:
    """The sum over a rank's share, whose gradients are all 1."""
    elements = parameters[-1].last
    plan = BufferPlan(elements=elements, parameters=tuple(parameters), shares=(share,))
    state = MegatronState([plan], reduces=True)
    state.bind()
    state.gradients[0].fill_(1.0)
    return float(state.squared_gradients())


@pytest.mark.parametrize("rank", range(4))
def test_a_share_within_what_other_ranks_count_counts_nothing(rank: int) -> None:
    parameters = [parameter(0, 60, is_counted=False), parameter(60, 20, is_counted=True)]
    assert squares(parameters, (20 * rank, 20 * rank + 20)) == (20.0 if rank == 3 else 0.0)


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=5), st.data())
def test_each_counted_gradient_is_counted_by_one_share(
    sizes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    parameters: list[BufferParameter] = []
    for size, is_counted in sizes:
        first = parameters[-1].last if parameters else 0
        parameters.append(parameter(first, size, is_counted=is_counted))
    end = parameters[-1].last
    middle = data.draw(st.integers(0, end))
    total = sum(squares(parameters, share) for share in ((0, middle), (middle, end)))
    assert total == sum(size for size, is_counted in sizes if is_counted)

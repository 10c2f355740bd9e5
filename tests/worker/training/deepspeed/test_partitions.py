"""Where ZeRO's partitions cut parameters."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.worker.training.deepspeed.partitions import GRAIN, partition

SHAPES = st.lists(
    st.lists(st.sampled_from([1, 2, 3, 7, 16, 24, 64, 130]), max_size=3).map(tuple),
    min_size=1,
    max_size=9,
)


@given(shapes=SHAPES, count=st.integers(1, 9))
def test_every_element_is_in_one_box_of_whole_rows_at_an_aligned_place(
    shapes: list[tuple[int, ...]], count: int
) -> None:
    named = {str(index): shape for index, shape in enumerate(shapes)}
    cut = partition(named, count)
    rows: dict[str, list[int]] = {name: [] for name in named}
    for index in range(count):
        end = 0
        for box in cut.boxes(index):
            elements = math.prod(box.shape)
            assert elements
            assert box.start % GRAIN == 0
            assert end <= box.start <= cut.size - elements
            end = box.start + elements
            shape = named[box.name]
            assert box.global_shape == shape
            assert box.shape[1:] == shape[1:]
            assert not any(box.offset[1:])
            rows[box.name] += range(box.offset[0], box.offset[0] + box.shape[0]) if shape else [0]
            # Where DeepSpeed, which knows nothing of boxes, has the box's first element.
            row = math.prod(shape[1:])
            first = cut.starts[box.name] + (box.offset[0] * row if shape else 0)
            assert first == index * cut.size + box.start
    assert rows == {name: list(range(shape[0] if shape else 1)) for name, shape in named.items()}


@given(shapes=SHAPES, count=st.integers(1, 9))
def test_gaps_and_parameters_fill_the_partitions(shapes: list[tuple[int, ...]], count: int) -> None:
    named = {str(index): shape for index, shape in enumerate(shapes)}
    cut = partition(named, count)
    gaps = dict(cut.gaps())
    end = 0
    for name, start in cut.starts.items():
        end += gaps.get(name, 0)
        assert end == start
        end += math.prod(named[name])
    assert end + gaps.get(None, 0) == cut.size * count
    assert cut.size % GRAIN == 0


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_padding_is_little_beside_a_real_model(count: int) -> None:
    """Qwen2-0.5B."""
    hidden, mlp = 896, 4864
    shapes: dict[str, tuple[int, ...]] = {"embedding": (151936, hidden)}
    for layer in range(24):
        for name, shape in {
            "query": (hidden, hidden),
            "query_bias": (hidden,),
            "key": (128, hidden),
            "value": (128, hidden),
            "out": (hidden, hidden),
            "gate": (mlp, hidden),
            "up": (mlp, hidden),
            "down": (hidden, mlp),
            "norm": (hidden,),
        }.items():
            shapes[f"{layer}.{name}"] = shape
    total = sum(math.prod(shape) for shape in shapes.values())
    cut = partition(shapes, count)
    assert cut.size * count < total * 1.001

"""The loads of a profile."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl.client.profiling.profile_grid import STEPS, EngineSize, GridPoint, grid

SIZE = st.builds(
    EngineSize,
    tp_sizes=st.sampled_from([(1, 2), (1, 2, 4), (2, 8)]),
    samples_max=st.integers(8, 300),
    sequence_tokens_max=st.integers(80, 9000),
    kv_tokens=st.integers(4000, 1 << 20),
    block_tokens=st.sampled_from([16, 32]),
)


@given(SIZE)
def test_every_load_fits_into_the_engine_and_comes_once(size: EngineSize) -> None:
    loads = grid(size)
    assert len(set(loads)) == len(loads)
    for each in loads:
        groups = size.tp_sizes[-1] // each.tp
        assert each.rows * groups <= size.samples_max
        assert each.prompt_tokens + each.draws <= size.sequence_tokens_max
        assert each.rows * (each.prompt_tokens + each.draws) * groups <= size.kv_tokens
        assert each.draws >= STEPS
    assert {each.tp for each in loads} == set(size.tp_sizes)


def test_a_profile_that_ends_early_covers_the_range() -> None:
    size = EngineSize(
        tp_sizes=(1, 2, 4),
        samples_max=256,
        sequence_tokens_max=16_384,
        kv_tokens=1 << 21,
        block_tokens=16,
    )
    loads = grid(size)
    assert len({each.rows for each in loads}) == 9
    assert sum(each.prompt_tokens <= 512 for each in loads) > len(loads) / 2
    early = loads[: len(loads) // 5]
    for tp in size.tp_sizes:
        own = [each for each in early if each.tp == tp]
        rows_max = max(each.rows for each in loads if each.tp == tp)
        assert {1, rows_max} <= {each.rows for each in own}
        assert min(each.prompt_tokens for each in own) == 8
        assert max(each.prompt_tokens for each in own) >= 2048
    assert loads[0] == GridPoint(tp=1, rows=1, prompt_tokens=8, draws=61)

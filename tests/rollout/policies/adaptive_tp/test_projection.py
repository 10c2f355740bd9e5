"""Expected lengths of unfinished rows."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl.rollout.policies.adaptive_tp.projection import DecodingRow, bound, project

ROW = st.builds(
    lambda prompt, drawn, more: DecodingRow(prompt + drawn, drawn, drawn + more),
    st.integers(1, 50),
    st.integers(0, 100),
    st.integers(1, 100),
)


@given(st.lists(st.lists(ROW, max_size=8), max_size=4), st.lists(st.integers(0, 250), max_size=40))
def test_each_row_ends_at_a_past_length_or_at_its_most(
    groups: list[list[DecodingRow]], past: list[int]
) -> None:
    found = project(groups, past)
    assert [len(rows) for rows in found] == [len(rows) for rows in groups]
    for rows, wanted in zip(found, groups, strict=True):
        for row, known in zip(rows, wanted, strict=True):
            final = known.drawn + row.left
            assert row.tokens == known.tokens
            assert 1 <= row.left <= known.most - known.drawn
            assert final in {*past, known.most}
            if not any(length > known.drawn for length in past):
                assert final == known.most


def test_many_equal_rows_end_as_the_past_responses_beyond_them_did() -> None:
    past = [*range(1, 101), *[10] * 500]
    (rows,) = project([[DecodingRow(30, 20, 200)] * 800], past)
    lengths = sorted(20 + row.left for row in rows)
    # 80 past responses were longer, ten of the rows for each of them.
    assert all(abs(length - (21 + index / 10)) < 1.5 for index, length in enumerate(lengths))


def test_the_bound_is_the_longest_response() -> None:
    assert [row.left for row in bound([[DecodingRow(30, 20, 200), DecodingRow(9, 1, 4)]])[0]] == [
        180,
        3,
    ]

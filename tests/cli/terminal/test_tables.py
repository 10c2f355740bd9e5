"""Tables fit a terminal without cutting words; programs get rows of equal columns."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from plexrl.cli.terminal.tables import table_lines, table_width, wrapped

words = st.text(st.sampled_from("abc-/:_.0123訓"), min_size=1, max_size=30)
cells = st.lists(words, max_size=6).map(" ".join)
tables = st.integers(1, 8).flatmap(
    lambda columns: st.tuples(
        st.lists(words, min_size=columns, max_size=columns),
        st.lists(st.lists(cells, min_size=columns, max_size=columns), max_size=5),
    )
)


@given(tables, st.integers(10, 100))
def test_no_line_is_wider_than_the_terminal_but_for_a_longer_word(
    table: tuple[list[str], list[list[str]]], width: int
) -> None:
    columns, rows = table
    for line in table_lines(columns, rows, width):
        label, _, rest = line.rpartition("  ")
        assert cell_len(line) <= width or " " not in rest, (label, rest)


@given(tables, st.one_of(st.none(), st.integers(10, 100)))
def test_every_word_is_there_whole(
    table: tuple[list[str], list[list[str]]], width: int | None
) -> None:
    columns, rows = table
    shown = " ".join(table_lines(columns, rows, width)).split()
    for word in [word for row in rows for cell in row for word in cell.split()]:
        assert word in shown


@given(tables)
def test_a_program_gets_one_line_for_each_row_with_every_column(
    table: tuple[list[str], list[list[str]]],
) -> None:
    columns, rows = table
    lines = table_lines(columns, rows, None)
    assert len(lines) == 1 + len(rows)
    for row, line in zip([columns, *rows], lines, strict=True):
        assert line.split() == " ".join(cell or "-" for cell in row).split()
        assert line == line.rstrip()


def test_columns_are_aligned_and_two_spaces_apart() -> None:
    rows = [("sums-1", "RUNNING", ""), ("longer-name", "", "3")]
    assert table_lines(("job", "state", "GPUs"), rows, None) == [
        "job          state    GPUs",
        "sums-1       RUNNING  -",
        "longer-name  -        3",
    ]


def test_at_a_terminal_the_widest_column_goes_over_several_lines() -> None:
    rows = [("sums-1", "waits for GPUs of another kind")]
    assert table_width(("job", "why"), rows) == 38
    assert table_lines(("job", "why"), rows, 30) == [
        "job     why",
        "──────  ──────────────────────",
        "sums-1  waits for GPUs of",
        "        another kind",
    ]


def test_what_does_not_fit_side_by_side_is_a_block_for_each_row() -> None:
    rows = [("a-rather-long-job-id", "RUNNING on two"), ("b", "")]
    assert table_lines(("job", "state"), rows, 24) == [
        "job    a-rather-long-job-id",
        "state  RUNNING on two",
        "",
        "job    b",
        "state  -",
    ]


def test_a_paragraph_keeps_its_words() -> None:
    assert wrapped("one two-three four", 9) == ["one", "two-three", "four"]

"""Output depends on whether a terminal or a program reads it."""

import pytest

from plexrl.cli.terminal.context import print_line, print_table, terminal_width, write_csv

TEXT = "a-word-that-is-long another-word-that-is-long"


def test_a_program_gets_whole_lines_and_a_title_above_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width() is None
    print_line(TEXT)
    print_table("Jobs\x1b[2J", ("job", "why"), [("a", None), ("b", TEXT)])
    assert capsys.readouterr().out.splitlines() == [
        TEXT,
        "",
        r"Jobs\u001b[2J",
        "job  why",
        "a    -",
        f"b    {TEXT}",
    ]


def test_a_width_that_is_asked_for_is_kept_in_a_pipe_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    print_line(TEXT)
    assert capsys.readouterr().out.splitlines() == TEXT.split()


def test_csv_has_no_cell_that_a_spreadsheet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(("job", "=metric"), [("=1+1", -0.5), ("@SUM(A1)", 2)])
    assert capsys.readouterr().out == "job,'=metric\n'=1+1,-0.5\n'@SUM(A1),2\n"

"""What others wrote cannot steer a terminal or forge a line of a log."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from plexrl.process.plain_text import PlainFormatter, is_plain, many_lines, one_line

BIDI = "\u202e"


def test_what_controls_a_terminal_is_shown_as_an_escape() -> None:
    for raw, shown in (
        ("\x1b[2J\x1b]0;title\x07", r"\u001b[2J\u001b]0;title\u0007"),
        ("done\rfailed", r"done\rfailed"),
        ("a\nb", r"a\nb"),
        (f"job{BIDI}gpj", r"job\u202egpj"),
        ("\x9b31m", r"\u009b31m"),
        ("\u2028", r"\u2028"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\udb40\udc41"),
        ("größer 訓練 ✓", "größer 訓練 ✓"),
    ):
        assert one_line(raw) == shown
        assert is_plain(raw) == (raw == shown)
    assert many_lines("a\n\tb\x1b[0m\r\n") == "a\n\tb\\u001b[0m\\r\n"


@given(st.text())
def test_nothing_else_is_changed_and_nothing_is_left(text: str) -> None:
    assert is_plain(one_line(text))
    assert one_line(one_line(text)) == one_line(text)
    assert is_plain(many_lines(text).replace("\n", "").replace("\t", ""))
    if is_plain(text):
        assert one_line(text) == many_lines(text) == text


def test_a_log_has_one_line_for_each_message() -> None:
    formatter = PlainFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord(
        "x", logging.INFO, "", 1, "GET %s", ("/a\nERROR \x1b[1mpwned",), None
    )
    assert formatter.format(record) == r"INFO GET /a\nERROR \u001b[1mpwned"
    try:
        raise ValueError("bad \x1b[1m")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    first, *others = formatter.format(record).splitlines()
    assert first == r"INFO GET /a\nERROR \u001b[1mpwned"
    assert others[0] == "Traceback (most recent call last):"
    assert others[-1] == r"ValueError: bad \u001b[1m"

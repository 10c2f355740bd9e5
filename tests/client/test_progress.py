"""A controller's progress: plain lines where it is piped, a bar below them at a terminal."""

import contextlib
import io
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plexrl.client.display.progress import LOGGER, Progress

ESCAPE = "\x1b"


def run_of(steps: int | None, file: "io.TextIOBase") -> None:
    with Progress(steps, file=file) as progress:  # type: ignore[arg-type]
        logging.getLogger("plexrl.client.blocking.cluster").info("cluster: %s", "http://[::1]:8000")
        progress.step(1, {"reward/mean": 0.25, "loss": float("nan")})
        progress.step(2, {"reward/mean": 0.5, "loss": -1.5})


def all_of(leader: int) -> str:
    """What a terminal is told until nobody has it open any more."""
    told = b""
    # Linux says so by an error.
    with contextlib.suppress(OSError):
        while chunk := os.read(leader, 4096):
            told += chunk
    os.close(leader)
    return told.decode()


def test_lines_that_are_piped_have_no_escape_codes_and_no_bar() -> None:
    told = io.StringIO()
    run_of(2, told)
    lines = [line.partition(" s  ")[2] for line in told.getvalue().splitlines()]
    assert ESCAPE not in told.getvalue()
    assert lines[0] == "cluster: http://[::1]:8000"
    assert lines[1].startswith("step 1/2  reward/mean  0.2500  loss     nan  ")
    assert lines[2].startswith("step 2/2  reward/mean  0.5000  loss -1.5000  ")
    assert len(lines) == 3


def test_steps_of_an_unknown_number_are_counted() -> None:
    told = io.StringIO()
    run_of(None, told)
    assert "step    2  reward/mean" in told.getvalue()


def test_at_a_terminal_a_bar_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = os.openpty()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(all_of, leader)
        with os.fdopen(follower, "w") as terminal:
            run_of(2, terminal)
        shown = reading.result()
    assert ESCAPE in shown
    assert "step 2/2  reward/mean  0.5000" in shown
    assert "2/2" in shown.replace("step 2/2", "")


def test_logging_is_as_before_once_the_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    before = (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers))
    told = io.StringIO()

    def fail() -> None:
        with Progress(file=told):
            LOGGER.warning("once")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)) == before
    assert told.getvalue().count("once") == 1
    assert "once" not in caplog.text


def test_the_readme_shows_the_first_controller_as_it_is() -> None:
    root = Path(__file__).parents[2]
    example = (root / "examples/first_controller.py").read_text()
    core = example[example.index("import random") :]
    assert f"```python\n{core}```\n" in (root / "README.md").read_text()

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
    """All output of a terminal until it is closed."""
    output = b""
    # Linux reports the close as an error.
    with contextlib.suppress(OSError):
        while chunk := os.read(leader, 4096):
            output += chunk
    os.close(leader)
    return output.decode()


def test_piped_output_has_no_escape_codes_and_no_bar() -> None:
    output = io.StringIO()
    run_of(2, output)
    lines = [line.partition(" s  ")[2] for line in output.getvalue().splitlines()]
    assert ESCAPE not in output.getvalue()
    assert lines[0] == "cluster: http://[::1]:8000"
    assert lines[1].startswith("step 1/2  reward/mean  0.2500  loss     nan  ")
    assert lines[2].startswith("step 2/2  reward/mean  0.5000  loss -1.5000  ")
    assert len(lines) == 3


def test_steps_are_counted_without_a_known_total() -> None:
    output = io.StringIO()
    run_of(None, output)
    assert "step    2  reward/mean" in output.getvalue()


def test_at_a_terminal_a_bar_shows_the_current_wait(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_logging_is_restored_after_the_block(caplog: pytest.LogCaptureFixture) -> None:
    before = (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers))
    output = io.StringIO()

    def fail() -> None:
        with Progress(file=output):
            LOGGER.warning("once")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)) == before
    assert output.getvalue().count("once") == 1
    assert "once" not in caplog.text


def test_the_readme_contains_the_first_controller_unchanged() -> None:
    root = Path(__file__).parents[2]
    example = (root / "examples/first_controller.py").read_text()
    core = example[example.index("import random") :]
    assert f"```python\n{core}```\n" in (root / "README.md").read_text()


def test_a_small_value_does_not_look_like_zero() -> None:
    shown = io.StringIO()
    with Progress(file=shown) as progress:
        progress.step(1, {"learning_rate": 1e-5, "reward": 0.25, "loss": -123456.0, "none": 0.0})
    assert "learning_rate   1e-05  reward  0.2500  loss -1.23e+05  none  0.0000" in shown.getvalue()


def test_lines_in_a_notebook_are_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class ZMQInteractiveShell:
        """What rich takes for a notebook."""

    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    with Progress(1) as progress:
        progress.step(1, {"loss": 0.5})
    assert "step 1/1  loss  0.5000" in capsys.readouterr().out

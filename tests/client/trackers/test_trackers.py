"""Every tracker has each row of a job's metrics once, whatever becomes of its controllers."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from plexrl.client.trackers.feed import ChosenTrackers
from plexrl.client.trackers.tracker import PACKAGES, check_trackers, marked_values
from plexrl.errors import ControllerReplacedError, InvalidRequestError
from tests.client.trackers.read_back import JOB, KEY, READERS, feed_of, log_step, metrics_of


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test where the tracker's library is not installed."""
    why = (
        "it needs an older pillow than other packages of `dev`" if name == "trackio" else "no `dev`"
    )
    return pytest.mark.skipif(
        find_spec(PACKAGES[name]) is None, reason=f"{name} is not installed: {why}"
    )


TRACKERS = [
    pytest.param("tensorboard", marks=needs("tensorboard")),
    *(
        pytest.param(name, marks=[needs(name), pytest.mark.filterwarnings("ignore")])
        for name in ("wandb", "mlflow", "trackio")
    ),
]
needs_tensorboard = needs("tensorboard")

WANDB_OF_THIS_PROCESS = ("WANDB_SERVICE", "_WANDB_SERVICE")
"""W&B's writer of this process, which another controller does not use."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert "trackers" not in [thread.name for thread in threading.enumerate()]


def expected(steps: list[int]) -> list[tuple[int, float, float]]:
    return [(step, step / 8, index) for index, step in enumerate(steps, start=1)]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_later_controller_continues_the_run_after_its_last_row(name: str, tmp_path: Path) -> None:
    log = metrics_of(tmp_path)
    steps = [1, 2, 3, 2, 3]
    for some in (steps[:2], [], steps[2:]):
        feed = feed_of(tmp_path, [name])
        for step in some:
            log_step(log, step)
        feed.close("completed" if some == steps[2:] else None)
    assert READERS[name](tmp_path) == expected(steps)


def run_controller(folder: Path, name: str, first: int, last: int, end: str) -> int:
    controller = [sys.executable, "-m", "tests.client.trackers.read_back"]
    ended = subprocess.run(
        [*controller, str(folder), name, str(first), str(last), end],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={n: v for n, v in os.environ.items() if n not in WANDB_OF_THIS_PROCESS},
        timeout=60,
        check=False,
    )
    return ended.returncode


@pytest.mark.parametrize(
    "name",
    [
        *TRACKERS[:2],
        pytest.param(
            "mlflow",
            marks=[needs("mlflow"), pytest.mark.slow, pytest.mark.filterwarnings("ignore")],
        ),
    ],
)
def test_a_killed_controller_loses_and_repeats_no_row(name: str, tmp_path: Path) -> None:
    for first, last in ((1, 40), (41, 43)):
        assert run_controller(tmp_path, name, first, last, "kill") == -signal.SIGKILL
    metrics_of(tmp_path).append(KEY, 44, {"reward/mean": 5.5})
    feed_of(tmp_path, [name]).close("completed")
    assert READERS[name](tmp_path) == expected(list(range(1, 45)))


@pytest.mark.parametrize("name", TRACKERS[1:2])
def test_a_controller_that_ends_writes_its_last_rows_before_the_library_ends(
    name: str, tmp_path: Path
) -> None:
    assert run_controller(tmp_path, name, 1, 40, "exit") == 0
    assert READERS[name](tmp_path) == expected(list(range(1, 41)))


def test_a_fork_keeps_no_locks_of_its_parents_runs(tmp_path: Path) -> None:
    feeds = [feed_of(tmp_path / name, ["tensorboard"]) for name in "ab"]
    child = os.fork()
    if not child:
        os._exit(not all(feed._lock.closed for feed in feeds))
    assert os.waitpid(child, 0)[1] == 0
    assert not any(feed._lock.closed for feed in feeds)
    for feed in feeds:
        feed.close()


def test_a_row_with_a_lower_step_is_marked() -> None:
    row = {"index": 7, "step": 3, "time": 0.0, "values": {"loss": 1.0}, "rewinds_from": 5}
    assert marked_values(row) == {"loss": 1.0, "plexrl/row": 7.0, "plexrl/rewinds_from": 5.0}  # type: ignore[arg-type]  # a plain dict


@needs_tensorboard
def test_an_unknown_tracker_is_refused_by_name() -> None:
    assert check_trackers("tensorboard, tensorboard,") == ("tensorboard",)
    with pytest.raises(InvalidRequestError, match=r"no tracker 'comet'.*mlflow, tensorboard"):
        check_trackers(["comet"])


@pytest.mark.skipif(find_spec("trackio") is not None, reason="trackio is installed")
def test_a_missing_library_is_named_with_its_extra() -> None:
    with pytest.raises(InvalidRequestError, match=r"pip install 'plexrl\[trackio\]'"):
        check_trackers(["trackio"])


@needs_tensorboard
def test_a_later_controller_takes_the_trackers_of_the_earlier_one(tmp_path: Path) -> None:
    environment = {"PLEXRL_TRACKER_DIR": str(tmp_path / "runs")}
    assert ChosenTrackers(None, environment).names_for(JOB) == ()
    feed_of(tmp_path, ["tensorboard"]).close()
    assert ChosenTrackers(None, environment).names_for(JOB) == ("tensorboard",)
    assert ChosenTrackers([], environment).names_for(JOB) == ()
    environment["PLEXRL_TRACKERS"] = "tensorboard"
    assert ChosenTrackers(None, environment).names_for("other") == ("tensorboard",)


def test_a_replaced_controller_whose_tracker_never_opened_frees_the_run_too(tmp_path: Path) -> None:
    from plexrl.client.trackers.feed import TrackerFeed
    from plexrl.client.trackers.tracker import TrackedRun

    def read(after: int) -> list[object]:
        raise ControllerReplacedError(f"another controller reads after {after}")

    (tmp_path / JOB).write_text("a file where the folder belongs")
    run = TrackedRun(job=JOB, name="digits", folder=tmp_path)
    feed = TrackerFeed(run, ["tensorboard"], read)  # type: ignore[arg-type]  # reads nothing
    feed._thread.join(20)
    is_over = not feed._thread.is_alive()
    feed.close()
    assert is_over


@needs_tensorboard
def test_a_replaced_controller_ends_its_copies(tmp_path: Path) -> None:
    from plexrl.client.trackers.feed import TrackerFeed
    from plexrl.client.trackers.tracker import TrackedRun

    def read(after: int) -> list[object]:
        raise ControllerReplacedError(f"another controller reads after {after}")

    run = TrackedRun(job=JOB, name="digits", folder=tmp_path / "runs")
    feed = TrackerFeed(run, ["tensorboard"], read)  # type: ignore[arg-type]  # reads nothing
    feed._thread.join()
    # The lock is free: the new controller's feed does not wait.
    metrics_of(tmp_path).append(KEY, 1, {"reward/mean": 1 / 8})
    feed_of(tmp_path, ["tensorboard"]).close()
    assert READERS["tensorboard"](tmp_path) == expected([1])
    feed.close()


def test_a_tracker_that_fails_does_not_disturb_the_controller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / JOB).write_text("a file where the folder belongs")
    metrics_of(tmp_path).append(KEY, 1, {"reward/mean": 1 / 8})
    feed = feed_of(tmp_path, ["tensorboard"])
    feed.close()
    assert "tracker tensorboard failed" in caplog.text

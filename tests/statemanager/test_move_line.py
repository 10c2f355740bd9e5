"""Moves take turns in the order they came, and the line has an end."""

import threading

import pytest

from plexrl.errors import OverloadedError
from plexrl.statemanager.move_line import MoveLine
from tests.statemanager.conftest import Daemon, MakeShard, StartDaemon, run_together, wait_until


def test_moves_without_a_place_wait_in_order() -> None:
    line = MoveLine(moves_max=1, waiting_max=8)
    done: list[int] = []

    def move(index: int) -> None:
        with line.place("Save", str(index)):
            done.append(index)

    threads = [threading.Thread(target=move, args=(index,)) for index in range(6)]
    with line.place("Load", "first"):
        assert [move.kind for move in line.running()] == ["Load"]
        for index, thread in enumerate(threads):
            thread.start()
            wait_until(lambda index=index: line.waiting() == index + 1)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert done == list(range(6))
    assert not line.running()


def wait_in_line(line: MoveLine) -> None:
    with line.place("Save", "b"):
        pass


def test_a_move_beyond_the_line_is_told_to_come_back() -> None:
    line = MoveLine(moves_max=1, waiting_max=1)
    with line.place("Save", "a"):
        waiting = threading.Thread(target=wait_in_line, args=(line,))
        waiting.start()
        wait_until(lambda: line.waiting() == 1)
        with (
            pytest.raises(OverloadedError, match="1 wait already") as refused,
            line.place("S", "c"),
        ):
            pytest.fail("there was no place")
        assert refused.value.details["retry_after_s"] == pytest.approx(0.1)
    waiting.join()


def test_a_move_that_fails_gives_its_place_back() -> None:
    line = MoveLine(moves_max=1, waiting_max=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"), line.place("Save", "a"):
            raise ValueError("no")
    assert not line.running()


def test_a_daemon_with_one_place_moves_everything_in_turn(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon: Daemon = start_daemon(moves_max=1)
    shards = [make_shard(daemon, deployment=f"{name}/actor") for name in "abcd"]
    run_together(*(lambda shard=shard: shard.offload(1) for shard in shards))
    run_together(*(lambda shard=shard: shard.load(1) for shard in shards))

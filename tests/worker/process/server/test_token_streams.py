"""A worker answers readers when there is something, and keeps nothing for them."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from plexrl.errors import InvalidRequestError
from plexrl.wire.framing import recv_frame
from plexrl.wire.messages import ReadStream
from plexrl.worker.process.server import token_streams
from plexrl.worker.process.server.server import WorkerConnection
from plexrl.worker.process.server.token_streams import RowLog, TokenLog, TokenStreams


class Reader:
    """A router's end of a connection."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        self._socket.setblocking(False)
        self._there = there
        self.connection = WorkerConnection(there)

    def question(self, reader: str, after: int = 0, stream: str = "") -> ReadStream:
        return ReadStream(
            operation="op",
            ask=f"ask-{reader}-{after}",
            reader=reader,
            stream=stream,
            after=after,
        )

    def answer(self) -> dict[str, Any] | None:
        """The next answer with the question's id; None where there is none yet."""
        try:
            header, _ = recv_frame(self._socket)
        except BlockingIOError:
            return None
        return {**header["answer"], "ask": header["operation"]}

    def close(self) -> None:
        self._socket.close()
        self._there.close()


@pytest.fixture
def router() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def test_a_reader_may_come_before_the_generation_and_finds_all_that_was_drawn_since(
    router: Reader,
) -> None:
    streams = TokenStreams()
    streams.read(router.connection, router.question("slow"))
    log = streams.begin("op", True)
    assert isinstance(log, TokenLog)
    streams.serve()
    assert router.answer() is None
    log.append(1, [7], [-0.5])
    streams.serve()
    first = router.answer()
    assert first is not None
    assert (first["rows"], first["next"]) == ([[1, [7], [-0.5]]], 1)
    # The reader sent no request for three steps; nothing waits for it, and nothing is lost.
    for token in (8, 9, 10):
        log.append(token % 2, [token], [-1.0])
        streams.serve()
    assert router.answer() is None
    streams.read(router.connection, router.question("slow", 1, log.name))
    second = router.answer()
    assert second is not None
    assert second["rows"] == [[0, [8, 10], [-1.0, -1.0]], [1, [9], [-1.0]]]


def test_a_place_in_another_run_begins_at_the_start(router: Reader) -> None:
    streams = TokenStreams()
    log = streams.begin("op", True)
    assert isinstance(log, TokenLog)
    log.append(0, [7], [0.0])
    streams.read(router.connection, router.question("one", 5, "former"))
    found = router.answer()
    assert found is not None
    assert (found["stream"], found["next"]) == (log.name, 1)


def test_readers_are_notified_of_the_end_and_have_one_request_at_a_time(router: Reader) -> None:
    streams = TokenStreams()
    log = streams.begin("op", True)
    streams.read(router.connection, router.question("one"))
    streams.read(router.connection, router.question("one", 0, "again"))
    assert streams.end("op") is log
    found = router.answer()
    assert found is not None
    assert found["ended"]
    assert router.answer() is None, "the former question of the same reader is void"


def test_a_request_after_the_end_is_answered_at_once(
    router: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_streams, "ENDED_MAX", 2)
    streams = TokenStreams()
    for operation in ("former", "op", "other"):
        streams.begin(operation, True)
        streams.end(operation)
    streams.read(router.connection, router.question("late", 3, "run"))
    assert router.answer() == {"ended": True, "ask": "ask-late-3"}
    log = streams.begin("op", True)
    streams.read(router.connection, router.question("late", 3, "run"))
    assert router.answer() is None, "the generation has restarted"
    assert isinstance(log, TokenLog)
    log.append(0, [7], [0.0])
    streams.serve()
    assert router.answer() is not None
    # How many are remembered is bounded: of older ones nothing is known, as of those to come.
    streams.read(router.connection, replace(router.question("old"), operation="former"))
    assert router.answer() is None


def test_readers_are_bounded(router: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_streams, "READERS_MAX", 2)
    streams = TokenStreams()
    for name in ("a", "b", "c"):
        streams.read(router.connection, router.question(name))
    found = router.answer()
    assert found == {"nothing": True, "ask": "ask-a-0"}


def test_what_is_not_streamed_cannot_be_read(router: Reader) -> None:
    streams = TokenStreams()
    streams.begin("op", False)
    with pytest.raises(InvalidRequestError, match="was submitted without `stream`"):
        streams.read(router.connection, router.question("one"))


def test_rows_that_end_with_the_generation_reach_a_waiting_reader(router: Reader) -> None:
    streams = TokenStreams()
    log = streams.begin("op", "rows")
    assert isinstance(log, RowLog)
    streams.read(router.connection, router.question("one"))
    log.append(4, [7, 8], [-0.5, -1.0], 0, [[0, 3, 2]])
    log.append(1, [], [], 2, [[0, 3, 2]])
    assert streams.end("op") is log
    found = router.answer()
    assert found is not None
    assert found["rows"] == [[4, [7, 8], [-0.5, -1.0], 0, [[0, 3, 2]]], [1, [], [], 2, [[0, 3, 2]]]]
    assert found["next"] == 2
    assert log.order().tolist() == [4, 1]


def test_long_rows_come_in_several_replies_and_none_is_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_streams, "TOKENS_MAX", 4)
    log = RowLog()
    for row in range(5):
        log.append(row, [row] * 3, [0.0] * 3, 1, [])
    assert [row[0] for row in log.read(0)["rows"]] == [0, 1]
    assert [row[0] for row in log.read(4)["rows"]] == [4]
    assert log.read(4)["next"] == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_reach_no_reader(bad: float) -> None:
    tokens, rows = TokenLog(), RowLog()
    tokens.append(0, [7], [-0.5])
    tokens.append(1, [8, 9], [-0.5, bad])
    tokens.append(0, [7], [-0.5])
    assert tokens.read(0)["rows"] == [[0, [7], [-0.5]]]
    rows.append(0, [7, 8], [-0.5, bad], 0, [])
    rows.append(1, [7], [-0.5], 0, [])
    assert [row[0] for row in rows.read(0)["rows"]] == [1]

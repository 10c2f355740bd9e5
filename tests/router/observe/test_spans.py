"""Finished operations reach an OpenTelemetry collector, each span once."""

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plexrl.router.observe.spans import SpanSender, make_spans
from plexrl.wire.messages.views import LoggedOperationView, Operations
from tests.client.test_chrome_trace import row
from tests.router.collector import Collector, collecting

DEADLINE_S = 60.0


def logged(index: int, **fields: Any) -> LoggedOperationView:
    times = (100.0, 103.0, 107.0)
    return row(
        index,
        "a",
        "optim_step",
        times,
        **{
            "tenant": "t",
            "internal": False,
            "error": None,
            "switch_s": 2.0,
            "transfer_s": 1.0,
            "compute_s": 3.0,
            **fields,
        },
    )


class Log:
    """A fake scheduler with an operation log."""

    def __init__(self, rows: list[LoggedOperationView]) -> None:
        self.rows = rows
        self.requests: list[Mapping[str, Any]] = []

    async def call(self, method: str, params: Mapping[str, Any]) -> Operations:
        assert method == "list_operations"
        self.requests.append(params)
        rows = [row for row in self.rows if row["index"] > params["after"]]
        return {"operations": rows[: params["limit"]]}


async def send_until(log: Log, collector: Collector, place: Path, count: int) -> None:
    """Run a sender until `count` spans have arrived and none is left to send."""
    sender = SpanSender(
        log,  # type: ignore[arg-type]
        collector.endpoint,
        place,
        page=3,
        poll_s=0.01,
        retry_s=0.01,
    )
    sending = asyncio.create_task(sender.run())
    async with asyncio.timeout(DEADLINE_S):
        while len(collector.spans) < count or log.requests[-1]["after"] < log.rows[-1]["index"]:
            assert not sending.done()
            await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


def test_an_operation_is_a_trace_with_a_span_for_each_phase() -> None:
    made = make_spans([logged(1), logged(2, error={"code": "execution_failed"})])
    assert make_spans([logged(1)])[0].get_span_context() == made[0].get_span_context()
    traces = {span.context.trace_id for span in made if span.context is not None}
    assert len(traces) == 2
    (whole, failed) = [span for span in made if span.parent is None]
    assert (whole.name, whole.start_time, whole.end_time) == (
        "plexrl.optim_step",
        100_000_000_000,
        107_000_000_000,
    )
    assert whole.attributes is not None
    assert whole.attributes["plexrl.deployment"] == "a/actor"
    assert (whole.status.is_ok, failed.status.description) == (True, "execution_failed")
    below = [span for span in made if span.parent == whole.get_span_context()]
    assert [span.name for span in below] == ["queue", "switch", "transfer", "compute"]
    assert all(one.end_time == other.start_time for one, other in itertools.pairwise(below))


def test_each_operation_is_sent_once_despite_refusals_and_restarts(
    tmp_path: Path,
) -> None:
    log = Log([logged(index) for index in range(1, 8)])
    place = tmp_path / "spans.json"
    with collecting() as collector:
        collector.refuses = 2
        asyncio.run(send_until(log, collector, place, 7 * 5))
        log.rows += [logged(8)]
        asyncio.run(send_until(log, collector, place, 8 * 5))
    assert len({span.span_id for span in collector.spans}) == len(collector.spans) == 8 * 5
    assert collector.services == {"plexrl"}
    names = {span.name for span in collector.spans}
    assert names == {"plexrl.optim_step", "queue", "switch", "transfer", "compute"}


def test_a_sender_that_cannot_store_its_position_continues(tmp_path: Path) -> None:
    log = Log([logged(index) for index in range(1, 8)])
    with collecting() as collector:
        asyncio.run(send_until(log, collector, tmp_path / "none" / "spans.json", 7 * 5))
    assert len(collector.spans) == 7 * 5

"""Finished operations as OpenTelemetry spans, sent by OTLP over HTTP (`plexrl[otel]`).

An operation is a trace: a span from its acceptance to its end, and a child span for each phase. Ids
follow from the operation's id, so a span that is sent twice, after a crash, is the same span. The
position up to which the log has been sent is kept in a file. While the collector is unreachable,
spans wait in the scheduler's operation log, for as long as the log keeps them.
"""

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import urlsplit

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.process.folders.durable_files import create_durably, rename_durably
from plexrl.proxies import is_own_address
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.views import LoggedOperationView
from plexrl.wire.operations import ended_at, phases

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from plexrl.router.execution.scheduler_link import SchedulerLink

LOG = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_S = 30.0
"""Pause after the collector has refused spans."""
PAGE = 500
NS = 1_000_000_000
Attribute = Literal[
    "job",
    "deployment",
    "tenant",
    "group",
    "kind",
    "operation",
    "state",
    "tokens",
    "seq",
    "payload_bytes",
    "result_bytes",
    "internal",
]
ATTRIBUTES: tuple[Attribute, ...] = get_args(Attribute)


def make_spans(rows: Sequence[LoggedOperationView]) -> "list[ReadableSpan]":
    """Make the spans of rows of the operation log."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class OwnIds(IdGenerator):
        """Generates ids that follow from the operation's id."""

        operation = ""
        spans = 0

        def generate_trace_id(self) -> int:
            return int.from_bytes(_digest(self.operation)[:16], "big")

        def generate_span_id(self) -> int:
            self.spans += 1
            return int.from_bytes(_digest(f"{self.operation}/{self.spans}")[:8], "big")

    ids, kept = OwnIds(), InMemorySpanExporter()
    resource = Resource({"service.name": "plexrl", "service.version": _version()})
    provider = TracerProvider(id_generator=ids, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("plexrl")
    for row in rows:
        ids.operation, ids.spans = str(row["operation"]), 0
        attributes = {f"plexrl.{name}": row[name] for name in ATTRIBUTES if row[name] is not None}
        whole = tracer.start_span(
            f"plexrl.{row['kind']}",
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            start_time=round(NS * row["submitted_at"]),
            attributes=attributes,
        )
        if row["error"] is not None:
            code = str(row["error"]["code"])
            whole.set_attribute("plexrl.error", code)
            whole.set_status(trace.Status(trace.StatusCode.ERROR, code))
        for phase, (start, end) in phases(row):
            part = tracer.start_span(
                phase, context=trace.set_span_in_context(whole), start_time=round(NS * start)
            )
            part.end(round(NS * end))
        whole.end(round(NS * ended_at(row)))
    return list(kept.get_finished_spans())


class SpanSender:
    """Sends new rows of the operation log, until cancelled."""

    def __init__(
        self,
        scheduler: "SchedulerLink",
        endpoint: str,
        position_file: Path,
        *,
        page: int = PAGE,
        poll_s: float = POLL_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """`position_file` stores the index of the last row sent.

        Raises:
            InvalidRequestError: the libraries are not installed.
        """
        self._scheduler = scheduler
        self._position_file = position_file
        self._page, self._poll_s, self._retry_s = page, poll_s, retry_s
        self._exporter = _exporter(endpoint)

    async def run(self) -> None:
        """Send rows until cancelled; rows that could not be sent are tried again."""
        after = self._read_position()
        pause_s = self._poll_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._poll_s
            try:
                while rows := await self._rows(after):
                    if not await asyncio.to_thread(self._send, rows):
                        pause_s = self._retry_s
                        break
                    after = int(rows[-1]["index"])
                    self._write_position(after)
            except (PlexRLError, OSError) as error:
                LOG.info("no operations to send as spans: %s", error)

    async def _rows(self, after: int) -> list[LoggedOperationView]:
        wanted = {"tenant": None, "as_operator": True, "after": after, "limit": self._page}
        return (await self._scheduler.call(m.LIST_OPERATIONS, wanted))["operations"]

    def _send(self, rows: Sequence[LoggedOperationView]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export(make_spans(rows)) == SpanExportResult.SUCCESS

    def _read_position(self) -> int:
        try:
            return int(json.loads(self._position_file.read_text())["after"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _write_position(self, after: int) -> None:
        # Several routers may write the same file, so each uses a temporary file of its own.
        part = self._position_file.with_suffix(f".{uuid.uuid4().hex[:12]}.part")
        create_durably(part, json.dumps({"after": after}).encode())
        rename_durably(part, self._position_file)


def _exporter(endpoint: str) -> "SpanExporter":
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise InvalidRequestError(
            f"otlp_endpoint is {endpoint!r} and OpenTelemetry is not installed: "
            "pip install 'plexrl[otel]', or leave the endpoint out"
        ) from error
    session = requests.Session()
    # It would look for a collector on this machine through the environment's proxy.
    session.trust_env = not is_own_address(urlsplit(endpoint).hostname or "")
    return OTLPSpanExporter(endpoint=endpoint, timeout=10, session=session)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _version() -> str:
    try:
        return version("plexrl")
    except PackageNotFoundError:
        # Running from a source tree.
        return "unknown"

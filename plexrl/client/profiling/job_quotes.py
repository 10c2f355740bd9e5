"""Asks a cluster when a job would start and end, what it would cost, and whom it would delay."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plexrl.client.calls.transport import Call
from plexrl.client.data.demand import DemandTrace, plain_trace
from plexrl.limits import check_numbers
from plexrl.wire.messages.overview_views import QuoteFiguresView, QuoteView
from plexrl.wire.parameter_checks import check_identifier

if TYPE_CHECKING:
    from plexrl.client.calls.transport import Transport

QUOTE_PATH = "/v1/jobs/quote"
QUOTE_S_MAX = 300.0
"""The cluster answers or refuses within less."""
QUOTED = (
    *("start_s", "start_low_s", "start_high_s", "end_s", "end_low_s", "end_high_s"),
    "gpu_hours",
)
"""The figures that a job keeps."""
_OF_JOB = ("name", "tenant", "priority", "slo", "expected_s")


class JobQuotes:
    """Quotes of jobs that are known by others. Nothing is submitted."""

    def __init__(self, transport: "Transport") -> None:
        self._transport = transport

    def like(
        self,
        job: str,
        *,
        steps: int,
        priority: int = 0,
        slo: float | None = None,
        price: float | None = None,
    ) -> QuoteView:
        """The quote of a job of `steps` cycles with the demand of the own job with the id `job`,
        which may have ended. `priority` and `slo` are as in `create_job`; `price` is that of a
        GPU-hour.

        Raises:
            CapacityError: the cluster cannot hold it.
            OverloadedError: another quote is being made, or there is too much work to simulate.
        """
        check_identifier("job", job)
        body = {"name": job, "like": job, "steps": steps, "priority": priority, "slo": slo}
        return self.ask({**body, "price": price})

    def of_row(
        self,
        name: str,
        *,
        gpus: int,
        steps: int | None = None,
        expected_s: float | None = None,
        rollout_gpus: int = 0,
        state_bytes: int = 1,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
        priority: int = 0,
        slo: float | None = None,
        price: float | None = None,
    ) -> QuoteView:
        """The quote of a job `name` that trains on `gpus` GPUs and generates on `rollout_gpus`, as
        a row of a trace describes it: `steps` cycles of its demand `trace`, or `expected_s` seconds
        of work without a pause. `state_bytes` is the size of its training state. `node_type`,
        `priority` and `slo` are as in `create_job`; `price` is that of a GPU-hour. Raises as
        `like`."""
        row = {
            "gpus": gpus,
            "rollout_gpus": rollout_gpus,
            "state_bytes": state_bytes,
            "node_type": node_type,
            "trace": plain_trace(trace),
        }
        body = {"name": name, "row": row, "steps": steps, "expected_s": expected_s}
        return self.ask({**body, "priority": priority, "slo": slo, "price": price})

    def ask(self, body: Mapping[str, Any]) -> QuoteView:
        """Send the request `body` of the HTTP API."""
        plain = {name: value for name, value in body.items() if value is not None}
        check_numbers("quote", plain)
        call = Call(method="POST", path=QUOTE_PATH, json=plain, read_timeout_s=QUOTE_S_MAX)
        found: QuoteView = self._transport.request(call).json()
        return found


def figures_of(quote: QuoteFiguresView) -> dict[str, float]:
    """The figures of a quote that its job keeps."""
    return {name: value for name in QUOTED if isinstance(value := quote.get(name), int | float)}


def asked_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a job's submission that a quote depends on."""
    return {name: job[name] for name in _OF_JOB if job.get(name)}

"""Compares what jobs were quoted with what came of them. Pure.

The errors of a tenant's newest completed jobs give the 80 % intervals of its next quotes, by split
conformal prediction (`state.demand.wait_intervals`). An error is relative to the quoted time to the
end, so that long and short jobs are of one kind. A tenant's jobs change its own intervals only:
what it says that it was quoted cannot harm others.

The intervals of ends adapt to how many ends were inside theirs. A live job that is past its
interval is outside already: its error is not known yet, and it is a large one.
"""

from plexrl.ids import TenantId
from plexrl.scheduler.state.demand.job_quote import JobQuote
from plexrl.scheduler.state.demand.wait_intervals import (
    CLUSTER_ERRORS,
    COLD_FACTOR,
    OUTSIDE,
    adapted,
    keep,
)
from plexrl.scheduler.state.records import Job, State
from plexrl.scheduler.state.tenant import Tenant
from plexrl.wire.messages.run_views import QuotedJobView

SCALE_S_MIN = 1.0
"""Shortest time that an error is relative to."""
HOUR_S = 3600.0


def scale_of(end_s: float) -> float:
    """The seconds that errors of a quote with this end are relative to."""
    return max(end_s, SCALE_S_MIN)


def remember_quote(state: State, job: Job, now: float) -> None:
    """Keep the errors of a completed job's quote, if it had one."""
    tenant, quote = state.tenants.get(job.tenant), job.quote
    if quote is None or tenant is None or job.placed_at is None:
        return
    scale_s = scale_of(quote.end_s)
    start_error = (job.placed_at - job.submitted_at - quote.start_s) / scale_s
    keep(tenant.quoted_starts, start_error, CLUSTER_ERRORS)
    took_s = now - job.submitted_at
    keep(tenant.quoted_ends, (took_s - quote.end_s) / scale_s, CLUSTER_ERRORS)
    if not _is_guess(quote):
        is_inside = quote.end_low_s <= took_s <= quote.end_high_s
        tenant.quoted_shift = adapted(tenant.quoted_shift, is_inside=is_inside)


def outside_of(state: State, tenant: Tenant, now: float) -> float:
    """The part of the errors that the interval of the tenant's next quoted end leaves out."""
    shift = tenant.quoted_shift
    for job in state.jobs.values():
        if job.tenant == tenant.tenant and job.quote is not None and not job.state.is_final:
            is_late = now - job.submitted_at > job.quote.end_high_s
            if is_late and not _is_guess(job.quote):
                shift = adapted(shift, is_inside=False)
    return OUTSIDE + shift


def _is_guess(quote: JobQuote) -> bool:
    """Whether its interval comes from no errors, and so teaches nothing about intervals."""
    guess = quote.end_s / COLD_FACTOR, quote.end_s * COLD_FACTOR
    return (quote.end_low_s, quote.end_high_s) == guess


def quoted_jobs(state: State, tenant: TenantId | None) -> list[QuotedJobView]:
    """The tenant's jobs, or all, that had a quote, oldest first."""
    jobs = [job for job in state.jobs.values() if tenant in (None, job.tenant)]
    return [quoted_job(job, job.quote) for job in jobs if job.quote is not None]


def quoted_job(job: Job, quote: JobQuote) -> QuotedJobView:
    """A job's quote beside its bill; what has not happened yet is None."""
    since = job.submitted_at
    return {
        "tenant": job.tenant,
        "job": job.job,
        "name": job.name,
        "state": job.state.value,
        "quoted_start_s": quote.start_s,
        "quoted_end_s": quote.end_s,
        "quoted_end_low_s": quote.end_low_s,
        "quoted_end_high_s": quote.end_high_s,
        "quoted_gpu_hours": quote.gpu_hours,
        "start_s": None if job.placed_at is None else job.placed_at - since,
        "end_s": None if job.ended_at is None else job.ended_at - since,
        "gpu_hours": sum(row.gpu_seconds for row in job.usage.values()) / HOUR_S,
    }

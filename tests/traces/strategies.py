"""Hypothesis strategies for all valid jobs and response lengths."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from plexrl.traces import ResponseLength, TraceJob, TraceSegment

# Line ends, other control characters and lone surrogates are what a text may not have.
TEXTS = st.text(
    st.characters(exclude_categories=("Cc", "Cs")) | st.sampled_from("\",;: '=+-@"), max_size=12
)
SECONDS = st.floats(0.0, 1e9) | st.integers(0, 10**9).map(float)
LONGER = st.floats(1e-9, 1e9)
FUNCTIONS = st.sampled_from(("log_prob", "update", "sync", "ref_log_prob", "v2"))


@st.composite
def cycles(draw: st.DrawFn) -> dict[str, Any]:
    """A period and what lies in it."""
    gaps = draw(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), SECONDS), max_size=5))
    at_s, segments = 0.0, []
    for gap_s, duration_s, slack_s in gaps:
        segment = TraceSegment(
            function=draw(FUNCTIONS),
            offset_s=at_s + gap_s,
            duration_s=duration_s,
            slack_s=slack_s,
        )
        segments.append(segment)
        at_s = segment.offset_s + segment.duration_s
    return {
        "period_s": max(1e-3, at_s + draw(st.floats(0, 1e3))),
        "jitter_s": draw(st.floats(0, 1e3)),
        "segments": tuple(segments),
    }


@st.composite
def jobs(draw: st.DrawFn) -> TraceJob:
    """One job; `submit_s` and `job_id` are made to fit by `traces`."""
    demand = draw(st.none() | cycles())
    count = draw(st.none() | st.integers(1, 1 << 62))
    gpus = draw(st.integers(0, 100_000))
    has_duration = count is None or demand is None or draw(st.booleans())
    return TraceJob(
        job_id="job",
        submit_s=draw(SECONDS),
        gpus=gpus,
        tenant=draw(TEXTS),
        duration_s=draw(LONGER) if has_duration else None,
        cycles=count,
        rollout_gpus=draw(st.integers(0 if gpus else 1, 100_000)),
        node_type=draw(TEXTS),
        model=draw(TEXTS),
        state_bytes=draw(st.none() | st.integers(0, (1 << 63) - 1)),
        staleness=draw(st.integers(0, 1000)),
        priority=draw(st.integers(-1000, 1000)),
        wait_s=draw(st.none() | SECONDS),
        outcome=draw(st.sampled_from(("", "completed", "failed", "cancelled"))),
        **(demand or {}),
    )


@st.composite
def traces(draw: st.DrawFn, min_size: int = 1) -> list[TraceJob]:
    """Jobs in order, of different ids."""
    made = draw(st.lists(jobs(), min_size=min_size, max_size=8))
    names = draw(st.lists(TEXTS.filter(bool), min_size=len(made), max_size=len(made), unique=True))
    submits = sorted(job.submit_s for job in made)
    return [
        replace(job, job_id=name, submit_s=submit_s)
        for job, name, submit_s in zip(made, names, submits, strict=True)
    ]


LENGTHS = st.builds(
    ResponseLength,
    output_tokens=st.integers(0, 10**9),
    prompt_tokens=st.none() | st.integers(0, 10**9),
    arrival_s=st.none() | SECONDS,
    group=TEXTS,
    source=TEXTS,
)

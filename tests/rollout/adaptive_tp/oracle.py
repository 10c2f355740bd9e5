"""Slow, obvious counterparts of the predictor and of the switch controller."""

from collections.abc import Callable, Sequence

from plexrl.client.data.decode_profile import DecodeProfile, ProfilePoint, ProfileSubject
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.remaining import UnfinishedRow, deal

Rows = Sequence[UnfinishedRow]
StepSeconds = Callable[[int, int, float], float]


def subject(sizes: tuple[int, ...] = (1, 2, 4)) -> ProfileSubject:
    return ProfileSubject(
        model="m", dtype="float32", device="cpu", tp_sizes=sizes, kv_token_bytes=1000
    )


def modelled(tp: int, rows: int, tokens: float) -> float:
    """A decode step on a GPU: a large group reads weights and caches faster and waits longer for
    its all-reduces."""
    return (
        8.0 / tp + 0.01 * rows + 0.0005 * tokens / tp + (0 if tp == 1 else 0.5 * tp + 0.06 * rows)
    )


def profile(
    step_s: StepSeconds = modelled,
    *,
    sizes: tuple[int, ...] = (1, 2, 4),
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32),
    lengths: Sequence[int] = (8, 64, 512, 4096),
    switch_s: float = 20.0,
    kv_bytes_per_s: float | None = 1e8,
) -> DecodeProfile:
    points = [
        ProfilePoint(
            tp=size,
            rows=each,
            prompt_tokens=length,
            kv_tokens=each * length,
            step_s=step_s(size, each, each * length),
            prefill_s=1e-3 * each * length / size,
        )
        for size in sizes
        for each in rows
        for length in lengths
    ]
    return DecodeProfile(
        subject=subject(sizes),
        points=tuple(points),
        switch_s=switch_s,
        kv_bytes_per_s=kv_bytes_per_s,
    )


def group_s(predictor: LatencyPredictor, tp: int, rows: Rows, steps: range) -> float:
    """Seconds of these steps of a group, one by one."""
    found = 0.0
    for step in steps:
        alive = [row for row in rows if row.left > step]
        if alive:
            found += predictor.step_s(tp, len(alive), sum(row.tokens + step for row in alive))
    return found


def cost_s(
    predictor: LatencyPredictor, tp: int, groups: Sequence[Rows], new: int, step: int
) -> float:
    """T_switch after so many steps."""
    profile = predictor.profile
    lengths = [[row.tokens + step for row in group if row.left > step] for group in groups]
    ratio = min(tp, new) / max(tp, new)
    sent = max(map(sum, lengths)) * profile.subject.kv_token_bytes / tp * (1 - ratio)
    prefill_s = []
    for dealt in deal([row for group in groups for row in group], predictor.sizes[-1] // new):
        found = [row.tokens + step for row in dealt if row.left > step]
        if found:
            rms = (sum(each * each for each in found) / len(found)) ** 0.5
            prefill_s.append(predictor.prefill_s(new, len(found), rms))
    assert profile.kv_bytes_per_s is not None
    return profile.switch_s + min(sent / profile.kv_bytes_per_s, max(prefill_s))


def least_s(
    predictor: LatencyPredictor,
    tp: int,
    groups: Sequence[Rows],
    moments: Sequence[int],
) -> float:
    """The least time until the end of all plans: at each of `moments` (the last is the end) the
    groups stay or change."""
    if len(moments) < 2:
        return 0.0
    rows = [row for group in groups for row in group]
    steps = range(moments[0], moments[1])
    found = []
    for size in predictor.sizes:
        dealt = deal(rows, predictor.sizes[-1] // size)
        held = groups if size == tp else dealt
        seconds = max(group_s(predictor, size, each, steps) for each in held)
        if size != tp:
            seconds += cost_s(predictor, tp, groups, size, moments[0])
        rest = least_s(predictor, size, held, moments[1:])
        found.append(seconds + rest)
    return min(found)

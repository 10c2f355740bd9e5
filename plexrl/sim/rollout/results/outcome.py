"""The figures of a run. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plexrl.sim.rollout.results.recorder import Recorder
from plexrl.sim.rollout.setting import Setting, System


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """The figures of one run of a system. All but `decision_ms` is the same in every run."""

    system: System
    limit: int
    train_gpus: int
    throughput: float
    """Tokens of prompts and responses trained per second, after the warm-up."""
    step_s: float
    """Mean seconds of a training step after the warm-up, with its wait."""
    response_tokens: float
    """Mean length of the responses trained after the warm-up."""
    staleness: Mapping[int, int]
    """Trained trajectories by staleness, after the warm-up."""
    decode: float
    """Part of the instances' time spent on decoding."""
    prefill: float
    pull: float
    train: float
    """Part of the time in which the trainer works."""
    prefills: float
    """Mean number of times that a trajectory's KV cache was computed."""
    preemptions: float
    """Preemptions per trained trajectory."""
    run_s: float
    """Seconds of the whole run."""
    rollout_s: float
    """Mean seconds of a step of the whole run in which its training waits for responses."""
    reward_s: float
    """Mean seconds of a step of the whole run in which only rewards are computed."""
    untrained: float
    """Part of the generated tokens of the whole run that are not trained in it: those of aborted
    responses, and of those in progress at the end."""
    decision_ms: tuple[float, float] | None = None
    """Median and 99th percentile of a decision, in milliseconds of CPU time of this machine."""

    @property
    def staleness_max(self) -> int:
        """Largest staleness of a trained trajectory."""
        return max(self.staleness)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of trained trajectories."""
        count = sum(self.staleness.values())
        return sum(versions * many for versions, many in self.staleness.items()) / count

    def values(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        values = asdict(self) | {"label": self.system.label, "staleness_mean": self.staleness_mean}
        values["staleness"] = {str(key): many for key, many in sorted(self.staleness.items())}
        values["system"] = asdict(self.system)
        return values


def outcome(setting: Setting, system: System, recorder: Recorder) -> RolloutOutcome:
    """The figures of a recorded run."""
    measured = recorder.steps[setting.warmup_steps : setting.steps]
    start_s = recorder.steps[setting.warmup_steps - 1].end_s if setting.warmup_steps else 0.0
    lasting_s = measured[-1].end_s - start_s
    staleness: Counter[int] = Counter()
    for step in measured:
        staleness.update(step.staleness)
    trained = sum(staleness.values())
    gpu_s = recorder.rollout_gpus * recorder.end_s
    ends_s = [0.0, *(step.end_s for step in recorder.steps)]
    rewards_s = sum(step.reward_s for step in recorder.steps)
    waits_s = sum(step.start_s - end_s for step, end_s in zip(recorder.steps, ends_s, strict=False))
    count = len(recorder.steps)
    kept = sum(step.response_tokens for step in recorder.steps)
    all_trained = len(recorder.trained_numbers)
    return RolloutOutcome(
        system=system,
        limit=setting.workload.limit,
        train_gpus=recorder.train_gpus,
        throughput=sum(step.tokens for step in measured) / lasting_s,
        step_s=lasting_s / len(measured),
        response_tokens=sum(step.response_tokens for step in measured) / trained,
        staleness=dict(sorted(staleness.items())),
        decode=recorder.decode_gpu_s / gpu_s,
        prefill=recorder.prefill_gpu_s / gpu_s,
        pull=recorder.pull_gpu_s / gpu_s,
        train=sum(step.early_s + step.end_s - step.start_s for step in measured) / lasting_s,
        prefills=recorder.admissions / all_trained,
        preemptions=recorder.preemptions / all_trained,
        run_s=recorder.end_s,
        rollout_s=(waits_s - rewards_s) / count,
        reward_s=rewards_s / count,
        untrained=1.0 - kept / recorder.generated_tokens,
        decision_ms=_decision_ms(recorder.decide_s),
    )


def _decision_ms(decisions_s: Sequence[float]) -> tuple[float, float] | None:
    if not decisions_s:
        return None
    ordered = sorted(decisions_s)
    return 1e3 * ordered[len(ordered) // 2], 1e3 * ordered[len(ordered) * 99 // 100]

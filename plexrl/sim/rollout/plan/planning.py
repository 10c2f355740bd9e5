"""Compares the modes for one job: each with its best split of the GPUs, over several seeds."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from plexrl.client.data.rollout_profile import RolloutProfile
from plexrl.latency.models import Model
from plexrl.sim.rollout.plan.modes import Mode
from plexrl.sim.rollout.plan.profiled import profiled_setting
from plexrl.sim.rollout.results.gains import gain_over_sync
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.runs.split import Runner, best_splits
from plexrl.sim.rollout.setting import ON_POLICY, Setting, System, SystemName
from plexrl.sim.rollout.systems.pat.profile import switched_sizes

OnRun = Callable[[RolloutOutcome], None]
GAIN_MIN = 1.02
"""Least gain, less its spread, for which a mode is recommended: less is no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledJob:
    """The job that is planned."""

    profile: RolloutProfile
    gpus: int = 0
    """0: as many as it has."""
    model: Model | None = None

    def setting(self, seed: int, tensor_parallel: int) -> Setting:
        """The simulated setting."""
        return profiled_setting(
            self.profile,
            gpus=self.gpus,
            model=self.model,
            tensor_parallel=tensor_parallel,
            seed=seed,
        )

    def sizes(self) -> list[int]:
        """Tensor-parallel sizes whose latencies are known, and which leave a GPU to train."""
        if self.model is None:
            return [self.profile.instance_gpus]
        longest = self.profile.max_tokens + max(e.prompt_tokens for e in self.profile.lengths)
        total = self.gpus or (
            self.profile.instances * self.profile.instance_gpus + self.profile.trainer_gpus
        )
        return [tp for tp in self.model.sizes(longest) if tp < total]

    def sizes_of(self, mode: Mode) -> list[int]:
        """Sizes that are tried for a mode. That of `pat` is the smallest of several."""
        if mode.system.name != SystemName.PAT:
            return self.sizes()
        return [tp for tp in self.sizes() if len(self.tp_sizes(tp)) > 1]

    def tp_sizes(self, tensor_parallel: int) -> tuple[int, ...]:
        """Sizes between which `pat` switches that begins with this one."""
        if self.model is None:
            return ()
        return switched_sizes(self.setting(0, tensor_parallel), self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMode:
    """A mode with its settings, and what it would gain."""

    mode: Mode
    tensor_parallel: int
    rollout_gpus: int
    train_gpus: int
    shares_gpus: bool
    """All GPUs roll out, and then all train."""
    tp_sizes: tuple[int, ...] = ()
    """Sizes between which engines switch while they generate."""
    gain: float
    """Steps in the time of one step of the synchronous loop with its own best size; mean over
    seeds."""
    spread: float
    """Standard deviation over seeds."""
    staleness_max: int
    tokens_per_s: float

    @property
    def pays(self) -> bool:
        """Whether it gains more than what is no difference."""
        return self.gain - self.spread >= GAIN_MIN

    @property
    def python(self) -> tuple[str, ...]:
        """Arguments of `job.rollout`, one a line, and further lines of the controller."""
        instance = self.tp_sizes[-1] if self.tp_sizes else self.tensor_parallel
        lines = [
            f"policy={self.mode.policy}",
            f"instances={self.rollout_gpus // instance}",
            f"parallelism=plexrl.Parallelism(tp={instance})",
        ]
        lines += [f"tp_sizes={self.tp_sizes}"] if self.tp_sizes else []
        lines += ["shares_gpus=True"] if self.shares_gpus else []
        return (*lines, *self.mode.calls)

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        found = asdict(self) | {"pays": self.pays}
        found["mode"] = {
            "name": self.mode.name,
            "python": list(self.python),
            "trained": self.mode.trained,
            "is_on_policy": self.mode.is_on_policy,
            "system": asdict(self.mode.system),
        }
        return found


def plan_modes(
    run: Runner,
    job: ProfiledJob,
    modes: Sequence[Mode],
    seeds: Sequence[int],
    on_run: OnRun | None = None,
) -> list[PlannedMode]:
    """The modes that the job can have, in their order; the first one is the synchronous loop.

    Sizes and splits are those that are best for the first seed.

    Raises:
        InvariantError: a run breaks one of its own invariants.
    """
    modes = [mode for mode in modes if job.sizes_of(mode)]
    asked = [(mode, tp) for mode in modes for tp in job.sizes_of(mode)]
    first = best_splits(
        run.outcome,
        [(job.setting(seeds[0], tp), mode.system) for mode, tp in asked],
        on_run=on_run,
    )
    chosen: list[tuple[System, int]] = []
    for mode in modes:
        found = [
            (outcome, tp)
            for (other, tp), outcome in zip(asked, first, strict=True)
            if other is mode
        ]
        best, size = min(found, key=lambda each: _duration_s(each[0]))
        chosen.append((best.system, size))
    everything = best_splits(
        run.outcome,
        [(job.setting(seed, tp), system) for system, tp in chosen for seed in seeds],
        on_run=on_run,
    )
    count = len(seeds)
    by_mode = [everything[at * count : (at + 1) * count] for at in range(len(modes))]
    return [
        _row(job, mode, size, by_mode[0], found)
        for mode, (_, size), found in zip(modes, chosen, by_mode, strict=True)
    ]


def _duration_s(outcome: RolloutOutcome) -> float:
    """Time by which a mode's sizes are compared: on-policy runs train the same prompts in all."""
    return outcome.run_s if outcome.system.name in ON_POLICY else outcome.step_s


def _row(
    job: ProfiledJob,
    mode: Mode,
    size: int,
    base: Sequence[RolloutOutcome],
    found: Sequence[RolloutOutcome],
) -> PlannedMode:
    gains = []
    for sync, each in zip(base, found, strict=True):
        gain = gain_over_sync(each, [sync, each])
        assert gain is not None, "the synchronous loop is among the two"
        gains.append(gain)
    shares = found[0].system.name in ON_POLICY
    return PlannedMode(
        mode=mode,
        tensor_parallel=size,
        rollout_gpus=found[0].system.rollout_gpus or found[0].train_gpus,
        train_gpus=found[0].train_gpus,
        shares_gpus=shares,
        tp_sizes=job.tp_sizes(size) if mode.system.name == SystemName.PAT else (),
        gain=fmean(gains),
        spread=stdev(gains) if len(gains) > 1 else 0.0,
        staleness_max=max(each.staleness_max for each in found),
        tokens_per_s=fmean(each.throughput for each in found),
    )


def recommend(rows: Sequence[PlannedMode]) -> list[PlannedMode]:
    """The best mode that is on-policy, and the best of all if that gains more; none: none pays."""
    paying = sorted((row for row in rows if row.pays), key=lambda each: -each.gain)
    on_policy = [each for each in paying if each.mode.is_on_policy][:1]
    best = paying[:1] if paying[:1] != on_policy else []
    return [*on_policy, *best]

"""What stands in for parts that are being built: cycles and costs of moves."""

import itertools
import math
from random import Random

from plexrl.sim.scenario import Behaviour, NodeType, Pool
from plexrl.traces import TraceJob

TOKENS = 1_000_000
"""Of a mean cycle."""


class DrawnCycle:
    """One cycle."""

    __slots__ = ("gaps_s", "rollout_s", "segments_s", "tokens")

    def __init__(
        self,
        rollout_s: float,
        segments_s: tuple[float, ...],
        gaps_s: tuple[float, ...],
        tokens: int,
    ) -> None:
        self.rollout_s = rollout_s
        self.segments_s = segments_s
        self.gaps_s = gaps_s
        self.tokens = tokens


class CycleLaw:
    """Lognormal cycles round a job's profile."""

    def __init__(self, job: TraceJob, behaviour: Behaviour, seed: int) -> None:
        period_s = job.service_s if job.period_s is None else job.period_s
        segments = job.segments
        if segments:
            self.works = tuple(each.duration_s for each in segments)
            self.gaps = tuple(
                max(0.0, b.offset_s - a.offset_s - a.duration_s)
                for a, b in itertools.pairwise(segments)
            )
            self.rollout_s = max(0.0, period_s - sum(self.works) - sum(self.gaps))
        else:
            self.works, self.gaps, self.rollout_s = (period_s,), (), 0.0
        jitter = behaviour.jitter
        self.sigma = job.jitter_s / period_s if jitter is None else jitter
        self.correlation = behaviour.correlation
        self.key = f"{seed}:{job.job_id}:"

    def draw(self, number: int) -> DrawnCycle:
        """Draw."""
        if self.sigma == 0.0:
            return DrawnCycle(self.rollout_s, self.works, self.gaps, TOKENS)
        random = Random(self.key + str(number))
        common, own = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)
        mixed = self.correlation * common + math.sqrt(1.0 - self.correlation**2) * own
        half = self.sigma * self.sigma / 2.0
        work = math.exp(self.sigma * common - half)
        return DrawnCycle(
            self.rollout_s * math.exp(self.sigma * mixed - half),
            tuple(each * work for each in self.works),
            self.gaps,
            max(1, round(TOKENS * work)),
        )


class MoveCosts:
    """Seconds of moves, all state in host memory."""

    def __init__(self, pools: tuple[Pool, ...], switch_s: float | None) -> None:
        self.types = {pool.node_type.name: pool.node_type for pool in pools}
        self.switch_s = switch_s

    def load_s(self, node_type: str, state_bytes: int, gpus: int, tier: str) -> float:
        """Load s."""
        del tier
        if self.switch_s is not None:
            return self.switch_s / 2
        kind: NodeType = self.types[node_type]
        return kind.move_fixed_s + state_bytes / gpus / kind.host_bytes_per_s

    def offload_s(self, node_type: str, state_bytes: int, gpus: int, tier: str) -> float:
        """Offload s."""
        return self.load_s(node_type, state_bytes, gpus, tier)

    def migrate_s(self, node_type: str, state_bytes: int, gpus: int) -> float:
        """Migrate s."""
        kind = self.types[node_type]
        return (
            kind.move_fixed_s + state_bytes / max(1, gpus // kind.gpus) / kind.network_bytes_per_s
        )

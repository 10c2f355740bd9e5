"""Measures the fraction of the weights' bytes that a delta sync moves in a real RL run.

The task is the demo's: GRPO on sorting digits, from a warmed-up policy, on an embedded cluster. At
every step a rollout in fp32 and one in bf16 are synchronised by delta. What they then hold is
compared, by digest, with a pull of everything that shares nothing with theirs.
"""

import statistics
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

import plexrl
from benchmarks.sizes import sized
from examples.grpo_digits import TASKS, Controller, draw_digits, most_informative, parse
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.layout.keys import (
    ARENA_ALIGNMENT,
    DTYPE_BYTES,
    StateKey,
    StatePart,
    StateSlice,
)
from plexrl.statemanager.layout.state_digest import digest_of_slices
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, Role
from plexrl.statemanager.transfer.delta.codec import encode
from plexrl.statemanager.transfer.delta.delta import BATCH_BYTES

LEARNING_RATES = sized((1e-6, 1e-5, 1e-3), quick=(1e-3,))
STEPS = sized(24, quick=1)
UNCOUNTED = sized(4, quick=0)
"""First steps at each rate, in which the optimizer forgets the rate before."""
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


class Checker:
    """Pulls all of a published version into memory of its own."""

    def __init__(self, data_dir: Path, socket: str, job: str, dtype: str, model: plexrl.ModelSpec):
        from plexrl.worker.models import build_model, named_parameters

        slices, end = [], 0
        for name, parameter in named_parameters(build_model(model)):
            shape = tuple(parameter.shape)
            piece = StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name=name),
                dtype=DTYPES[dtype],
                global_shape=shape,
                offset=(0,) * len(shape),
                shape=shape,
                arena_offset=end,
            )
            slices.append(piece)
            end += -(-piece.nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        self._slices = tuple(slices)
        self._item_bytes = DTYPE_BYTES[DTYPES[dtype]]
        self._source = f"{job}/actor"
        self._socket = socket
        deployment = f"{job}/check-{dtype}"
        claims = Claims(role=Role.WORKER, job=job, deployment=deployment)
        self._arena = Arena(end)
        self._client = StateManagerClient(
            socket,
            deployment=deployment,
            rank=0,
            world_size=1,
            ticket=read_ticket_key(data_dir / "ticket.key").mint(claims),
        )
        self._client.register(self._arena, self._slices, group=deployment, token=1)
        self._former: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)

    def changed(self, seq: int, digest: str) -> tuple[float, float]:
        """The fraction of elements that differ from the version asked about before, and of bytes
        that a delta between the two is on the wire.

        Raises AssertionError: `digest` is not that of the version.
        """
        self._client.pull(sources=[self._socket], source=self._source, seq=seq, wants=self._slices)
        memory = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        found = digest_of_slices(self._slices, memory)
        assert found == digest, f"the rollout's weights are not version {seq}"
        former, self._former = self._former, memory.copy()
        if not len(former):
            return 1.0, 1.0
        words = f"u{self._item_bytes}"
        differing = int(np.count_nonzero(former.view(words) != memory.view(words)))
        total = sum(piece.nbytes for piece in self._slices)
        policy = DeltaPolicy()
        sent = sum(
            len(encode(old, new, policy.block_bytes))
            for at in range(0, len(memory), BATCH_BYTES)
            for old, new in ((former[at : at + BATCH_BYTES], memory[at : at + BATCH_BYTES]),)
        )
        return differing * self._item_bytes / total, min(1.0, sent / total)

    def close(self) -> None:
        self._client.close()
        self._arena.close()


class DeltaController(Controller):
    """The demo's controller with a second rollout, whose learning rate is told."""

    def __init__(self, job: plexrl.Job, steps: int) -> None:
        words = [
            "--exclusive",
            "--steps",
            str(steps),
            *sized([], quick=["--warm-up-steps", "1", "--workers", "1"]),
        ]
        options = parse(words)
        super().__init__(job, TASKS[options.task], options)
        model = plexrl.tiny_qwen2("0123456789sr=", seed=options.seed)
        self.model = model
        half = job.rollout_deployment("half", model, dtype="bfloat16")
        self.rollouts = {"float32": self.rollout, "bfloat16": half}

    def learn(self, step: int, learning_rate: float) -> None:
        digits = draw_digits(self.task, 16, self.rng, held_out=False)
        prompts, samples, rewards = self.generate(digits, n=16, seed=step + 1)
        chosen = most_informative(rewards, 8)
        kept = [[group[i] for i in row] for group, row in zip(samples, chosen, strict=True)]
        scores = np.take_along_axis(rewards, chosen, axis=1)
        deviation = scores.std(1, keepdims=True)
        advantages = (scores - scores.mean(1, keepdims=True)) / (deviation + 1e-4)
        batch = plexrl.Batch.from_samples(prompts, kept, advantages, keep=deviation[:, 0] > 0.0)
        if len(batch):
            self.actor.forward_backward(batch, plexrl.losses.grpo(clip_high=0.28))
            self.actor.optim_step(learning_rate=learning_rate, grad_clip_norm=1.0)

    def sync(self) -> dict[str, plexrl.SyncReport]:
        """Every rollout's report."""
        futures = {
            dtype: rollout.sync_weights(self.actor, delta=True, digest=True)
            for dtype, rollout in self.rollouts.items()
        }
        return {dtype: future.result(120) for dtype, future in futures.items()}


def measure(steps: int = STEPS) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures). `steps` at each learning rate."""
    running = start_embedded(virtual_gpus=4)
    try:
        with (
            plexrl.connect(running.url, running.api_key) as cluster,
            cluster.create_job("delta") as job,
        ):
            return _measured(running, cluster, job, steps)
    finally:
        running.close()


def _measured(
    running: EmbeddedCluster, cluster: plexrl.Cluster, job: plexrl.Job, steps: int
) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    controller = DeltaController(job, steps)
    controller.warm_up()
    socket = cluster.nodes()[0]["statemanager"]
    checkers = {
        dtype: Checker(running.data_dir, socket, job.job, dtype, controller.model)
        for dtype in DTYPES
    }
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with closing(checkers["float32"]), closing(checkers["bfloat16"]):
        for dtype, report in controller.sync().items():
            checkers[dtype].changed(report["weights_seq"], report["digest"])
        for rate in LEARNING_RATES:
            moved: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
            changed: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
            sent: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
            for step in range(steps):
                controller.learn(step, rate)
                for dtype, report in controller.sync().items():
                    seq, digest = report["weights_seq"], report["digest"]
                    differing, on_wire = checkers[dtype].changed(seq, digest)
                    if step >= UNCOUNTED:
                        moved[dtype].append(report["fraction"])
                        changed[dtype].append(differing)
                        sent[dtype].append(on_wire)
            for dtype in DTYPES:
                fraction, elements, on_wire = map(
                    statistics.median, (moved[dtype], changed[dtype], sent[dtype])
                )
                name = f"rl_delta_{dtype}_lr{rate:.0e}".replace("-0", "-").replace("-", "m")
                figures |= {
                    f"{name}_written": fraction,
                    f"{name}_elements": elements,
                    f"{name}_on_wire": on_wire,
                }
                label = (
                    f"delta of {dtype} at learning rate {rate:.0e}, median of {len(moved[dtype])}"
                )
                figure = f"{on_wire:.2%} of bytes sent"
                rows.append(
                    (label, figure, f"{elements:.2%} of elements", f"{fraction:.2%} written")
                )
    return rows, figures

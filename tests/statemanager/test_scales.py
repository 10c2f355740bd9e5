"""F8 with a scale: one for the whole tensor, and bits as torch casts them."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from plexrl.errors import InvalidRequestError, StateLostError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import PullReport, StateManagerClient
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.scales import Wants
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from tests.statemanager.conftest import DEADLINE_S, Daemon, StartDaemon
from tests.statemanager.weight_sync import (
    SERVING_TCP,
    SHAPES,
    Box,
    Rank,
    fsdp,
    part,
    weights,
    whole,
)

SCALED = ("embed", "experts")


class F8Rank:
    """A rank that wants boxes of two matrices in F8 with their scales, the norm in BF16."""

    def __init__(
        self, daemon: Daemon, boxes: Sequence[tuple[str, Box]], dtype: str, rank: int = 0
    ) -> None:
        self.boxes, self.dtype = boxes, dtype
        wanted: list[tuple[str, str, tuple[int, ...], Box]] = [
            (name, dtype if name in SCALED else "BF16", SHAPES[name], window)
            for name, window in boxes
        ]
        wanted += [(f"{name}_scale", "F32", (), ()) for name in SCALED]
        slices, end = [], 0
        for name, kind, shape, window in wanted:
            slices.append(
                StateSlice(
                    key=StateKey(part=StatePart.PARAMETER, name=name),
                    dtype=kind,
                    global_shape=shape,
                    offset=tuple(span.start for span in window),
                    shape=tuple(span.stop - span.start for span in window),
                    arena_offset=end,
                )
            )
            end += -(-slices[-1].nbytes // 64) * 64
        self.slices = tuple(slices)
        self.arena = Arena(end)
        self.client = StateManagerClient(
            daemon.config.listen,
            deployment="job/rollout",
            rank=rank,
            world_size=8,
            ticket=daemon.worker_ticket("job/rollout", rank, 8),
            timeout_s=DEADLINE_S,
        )
        self.client.register(self.arena, self.slices, group="job/rollout", token=1)

    def pull(
        self, sources: Sequence[str], version: int, delta: DeltaPolicy | None = None
    ) -> PullReport:
        return self.client.pull(
            sources=sources, source="job/actor", seq=version, wants=self.slices, delta=delta
        )

    def bytes_of(self, piece: StateSlice) -> npt.NDArray[np.uint8]:
        memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        return memory[piece.arena_offset : piece.arena_offset + piece.nbytes]

    def check(self, values: dict[str, npt.NDArray[np.float32]]) -> None:
        """Everything is as torch has it."""
        kind = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[self.dtype]
        limit = torch.finfo(kind).max
        by_name = {piece.key.name: piece for piece in self.slices}
        for name, window in self.boxes:
            tensor = torch.from_numpy(values[name])
            if name in SCALED:
                scale = tensor.abs().max() / torch.tensor(limit, dtype=torch.float32)
                found = self.bytes_of(by_name[f"{name}_scale"]).view(np.float32)[0]
                assert found == scale.numpy()
                cast = (tensor[window] / scale).clamp(-limit, limit).to(kind)
            else:
                cast = tensor[window].to(torch.bfloat16)
            expected = cast.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(self.bytes_of(by_name[name]), expected), name

    def close(self) -> None:
        self.client.close()
        self.arena.close()


@pytest.fixture
def node(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(**SERVING_TCP)


@pytest.fixture
def trainers(node: Daemon) -> Iterator[list[Rank]]:
    """Two, so that no shard has the largest magnitude of every tensor."""
    ranks = [Rank(node, "job/actor", rank, fsdp(rank, 2)) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def columns(index: int) -> list[tuple[str, Box]]:
    return [
        ("embed", part("embed", 1, index, 2)),
        ("experts", part("experts", 2, index, 2)),
        ("norm", whole("norm")),
    ]


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_parts_of_a_tensor_have_one_scale_and_the_bits_that_torch_gives(
    node: Daemon, trainers: list[Rank], way: str, dtype: str
) -> None:
    rollouts = [F8Rank(node, columns(index), dtype, index) for index in range(2)]
    sources = [node.config.listen if way == "shared memory" else node.tcp]
    for version in (1, 2):
        for trainer in trainers:
            trainer.publish(version)
        for rollout in rollouts:
            report = rollout.pull(sources, version)
            rollout.check(weights(version))
            # A scale is worked out here.
            scales = 4 * len(SCALED)
            nbytes = sum(piece.nbytes for piece in rollout.slices)
            assert report.bytes_moved == nbytes - scales
    for rollout in rollouts:
        rollout.close()


def test_replicas_share_what_came_with_its_scales(
    start_daemon: StartDaemon, node: Daemon, trainers: list[Rank]
) -> None:
    near = start_daemon(ticket_key_file=node.config.ticket_key_file)
    boxes = [(name, whole(name)) for name in ("experts", "norm", "embed")]
    rollouts = [F8Rank(near, boxes, "F8_E4M3", rank) for rank in range(4)]
    for trainer in trainers:
        trainer.publish(3)
    reports = [rollout.pull([node.tcp], 3) for rollout in rollouts]
    for rollout in rollouts:
        rollout.check(weights(3))
    assert [report.relayed_bytes for report in reports[1:]] == [0, 0, 0]
    for rollout in rollouts:
        rollout.close()


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
def test_a_delta_takes_in_tensors_whose_scale_has_changed(
    node: Daemon, trainers: list[Rank], way: str
) -> None:
    rollout = F8Rank(node, columns(1), "F8_E4M3")
    sources = [node.config.listen if way == "shared memory" else node.tcp]
    for trainer in trainers:
        trainer.publish(1)
    values = weights(1)
    rollout.pull(sources, 1, DeltaPolicy(block_bytes=64))
    # Of one tensor the largest element grows, in the part that is not wanted here; of the other
    # some elements change.
    values["embed"][3, 0] = 100.0
    values["experts"][:, 5, 40] += 0.25
    for trainer in trainers:
        for piece, (name, window) in zip(trainer.slices, trainer.boxes, strict=True):
            trainer.bits(piece)[...] = values[name][window].view(np.uint32)
        trainer.client.publish(seq=2, token=1)
    report = rollout.pull(sources, 2, DeltaPolicy(block_bytes=64))
    rollout.check(values)
    embed = next(piece for piece in rollout.slices if piece.key.name == "embed")
    assert report.bytes_moved < report.bytes_wanted
    if way == "tcp":
        # All of what has another scale, little of what has not.
        assert embed.nbytes < report.bytes_moved < 1.5 * embed.nbytes
    rollout.close()


def test_a_scale_needs_all_of_its_tensor(
    start_daemon: StartDaemon, node: Daemon, trainers: list[Rank]
) -> None:
    other = start_daemon(ticket_key_file=node.config.ticket_key_file)
    last = Rank(other, "job/actor", 7, fsdp(1, 2))
    trainers[0].publish(1)
    last.publish(1)
    # The rows of the first shard only.
    boxes = [(name, part(name, 0, 0, 2)) for name in ("embed", "experts", "norm")]
    rollout = F8Rank(node, boxes, "F8_E4M3")
    with pytest.raises(StateLostError, match="no shard holds all of embed"):
        rollout.pull([node.config.listen], 1)
    rollout.pull([node.config.listen, other.config.listen], 1)
    rollout.check(weights(1))
    last.close()
    rollout.close()


def test_a_scale_is_one_f32() -> None:
    def piece(name: str, dtype: str, shape: tuple[int, ...]) -> StateSlice:
        return StateSlice(
            key=StateKey(part=StatePart.PARAMETER, name=name),
            dtype=dtype,
            global_shape=shape,
            offset=(0,) * len(shape),
            shape=shape,
            arena_offset=0,
        )

    with pytest.raises(InvalidRequestError, match="one scale, in F32"):
        Wants.of([piece("w", "F8_E4M3", (4, 4)), piece("w_scale", "F32", (4, 1))])
    # Without one the cast is plain.
    assert Wants.of([piece("w", "F8_E4M3", (4, 4))]).scaled == ()

"""Deltas between versions, bit for bit, by themselves and through real daemons."""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import CorruptStateError, InvalidRequestError
from plexrl.statemanager.bytes.mapped_files import MappedData
from plexrl.statemanager.bytes.mapped_memory import Region
from plexrl.statemanager.bytes.strided_copy import copy_strided
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.plan.balance import Source
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.plan.plan import make_plan
from plexrl.statemanager.layout.strided.copies import StridedCopies
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.transfer.delta.codec import DeltaDecoder, Form, encode
from plexrl.statemanager.transfer.delta.delta import changed_blocks
from plexrl.statemanager.transfer.delta.stream import apply_delta, copy_changed, encode_delta
from plexrl.wire.messages import SaveRequest
from tests.statemanager.conftest import Daemon, StartDaemon
from tests.statemanager.weight_sync import SERVING_TCP, Rank, fsdp, slices_of, tensor_parallel

Bytes = npt.NDArray[np.uint8]


@st.composite
def versions(draw: st.DrawFn) -> tuple[Bytes, Bytes]:
    """Two versions of some bytes, a few of which differ."""
    size = draw(st.integers(0, 2000))
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    old = random.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    for at in draw(st.lists(st.integers(0, max(0, size - 1)), max_size=8)) if size else ():
        new[at] ^= draw(st.integers(0, 255))
    return old, new


@given(versions(), st.sampled_from([64, 128, 256]))
def test_a_delta_carries_the_blocks_that_differ_and_leads_to_the_new_bytes(
    pair: tuple[Bytes, Bytes], block_bytes: int
) -> None:
    old, new = pair
    flags = changed_blocks(old, new, block_bytes)
    slow = [
        bool((old[at : at + block_bytes] != new[at : at + block_bytes]).any())
        for at in range(0, len(new), block_bytes)
    ]
    assert flags.tolist() == slow
    payload = encode(old, new, block_bytes) if len(new) else b""
    assert len(payload) <= len(new) + 1
    decoder = DeltaDecoder(memoryview(payload), block_bytes)
    result = old.copy()
    assert decoder.apply(result) == any(slow)
    decoder.finish()
    assert np.array_equal(result, new)


def test_a_delta_that_was_cut_or_is_too_long_is_refused() -> None:
    old = np.zeros(FORM_BYTES, np.uint8)
    for new in (changed_as(form) for form in Form if form != Form.NONE):
        payload = encode(old, new, 64)
        with pytest.raises(CorruptStateError, match="shorter"):
            DeltaDecoder(memoryview(payload[:-1]), 64).apply(old.copy())
        decoder = DeltaDecoder(memoryview(payload + b"\0"), 64)
        decoder.apply(old.copy())
        with pytest.raises(CorruptStateError, match="longer"):
            decoder.finish()


FORM_BYTES = 64_001


def changed_as(form: Form) -> Bytes:
    """From zeros, such that this form is the shortest."""
    new = np.zeros(FORM_BYTES, np.uint8)
    match form:
        case Form.BLOCKS:
            new[640:12_800] = 1
        case Form.GAPS:
            # One gap is longer than a byte says, and one exactly as long as that.
            new[[0, 512, 2000, 64_000]] = 1
            new[3000 : 3000 + 2 * 256 * 20 : 2 * 256] = 1
        case Form.BITS:
            new[::8] = 1
        case Form.RAW:
            new[:] = 1
    return new


@pytest.mark.parametrize("form", list(Form))
def test_each_form_is_taken_where_it_is_shortest_and_leads_to_the_new_bytes(form: Form) -> None:
    old = np.zeros(FORM_BYTES, np.uint8)
    new = changed_as(form)
    payload = encode(old, new, 64)
    assert payload[0] == form
    result = old.copy()
    decoder = DeltaDecoder(memoryview(payload), 64)
    assert decoder.apply(result) == (form != Form.NONE)
    decoder.finish()
    assert np.array_equal(result, new)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (bytes([9]), "form 9"),
        (bytes([Form.GAPS]) + struct.pack("<II", 2, 1) + b"\1" + b"abcd", "do not match its words"),
        (bytes([Form.GAPS]) + struct.pack("<II", 1, 1) + b"\77" + b"ab", "exceeds its batch"),
    ],
)
def test_a_delta_that_nobody_encoded_is_refused(payload: bytes, what: str) -> None:
    with pytest.raises(CorruptStateError, match=what):
        DeltaDecoder(memoryview(payload), 64).apply(np.zeros(64, np.uint8))


@pytest.mark.parametrize("size", [0, 8, 65, 100])
def test_blocks_of_an_odd_size_are_refused(size: int) -> None:
    with pytest.raises(InvalidRequestError, match="multiple of 64"):
        DeltaPolicy(block_bytes=size)


def reshard(dtype: str) -> tuple[StridedCopies, int, int]:
    """StridedCopies of a tensor-parallel view of whole tensors, and the sizes of both memories."""
    held = slices_of(fsdp(0, 1), "F32")
    wants = slices_of(tensor_parallel(1, 2), dtype)
    plan = make_plan([Source(id="a", layout=Layout.of(held))], [Layout.of(wants)])
    return plan.targets[0].copies[0], end_of(held), end_of(wants)


def end_of(slices: Sequence[StateSlice]) -> int:
    return max(piece.arena_offset + piece.nbytes for piece in slices)


def mapped(memory: Bytes) -> MappedData:
    """In two regions that change places."""
    half = len(memory) // 2 // 4096 * 4096
    stored = np.concatenate([memory[half:], memory[:half]])
    rest = len(memory) - half
    regions = [
        Region(fd=0, offset=rest, nbytes=half, data_offset=0),
        Region(fd=0, offset=0, nbytes=rest, data_offset=half),
    ]
    return MappedData.of(regions, {0: stored})


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("way", ["sent", "copied"])
def test_a_delta_under_another_layout_and_dtype_leads_to_what_a_full_pull_brings(
    dtype: str, way: str
) -> None:
    copies, held_bytes, wanted_bytes = reshard(dtype)
    random = np.random.default_rng(3)
    old = random.standard_normal(held_bytes // 4).astype(np.float32).view(np.uint8)
    new = old.copy()
    for at in random.integers(0, held_bytes // 4, 60):
        new.view(np.float32)[at] += 1
    target, expected = np.zeros(wanted_bytes, np.uint8), np.zeros(wanted_bytes, np.uint8)
    copy_strided(old, target, copies)
    copy_strided(new, expected, copies)
    policy = DeltaPolicy(block_bytes=64)
    if way == "copied":
        moved = copy_changed(mapped(new), copies, target, policy)
    else:
        parts = encode_delta(mapped(old), mapped(new), copies, policy, verify=True)
        assert parts is not None
        payload = b"".join(parts)
        moved = len(payload)
        apply_delta(memoryview(payload), copies, target, 64, verify=True)
    assert np.array_equal(target, expected)
    assert 0 < moved < copies.nbytes / 4


def test_what_does_not_lead_to_the_new_version_is_told_by_its_digest() -> None:
    copies, held_bytes, wanted_bytes = reshard("F32")
    old = np.zeros(held_bytes, np.uint8)
    new = old.copy()
    new[::5000] = 1
    parts = encode_delta(mapped(old), mapped(new), copies, DeltaPolicy(), verify=True)
    assert parts is not None
    other = np.full(wanted_bytes, 7, np.uint8)
    with pytest.raises(CorruptStateError, match="another checksum than its version"):
        apply_delta(memoryview(b"".join(parts)), copies, other, 128, verify=True)
    assert encode_delta(mapped(old), mapped(old + 1), copies, DeltaPolicy(), verify=False) is None


@pytest.fixture
def node(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(**SERVING_TCP)


def nudge(rank: Rank, version: int) -> None:
    """A step that changes about one element in five hundred."""
    random = np.random.default_rng(version)
    for piece in rank.slices:
        bits = rank.bits(piece).view(np.uint32)
        bits[random.random(piece.shape) < 0.002] ^= np.uint32(1 << 22)


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_delta_sync_brings_little_and_leads_to_the_same_bits(
    node: Daemon, way: str, dtype: str
) -> None:
    trainers = [Rank(node, "job/actor", rank, fsdp(rank, 2)) for rank in range(2)]
    rollouts = [
        Rank(node, "job/rollout", rank, tensor_parallel(1, 2), dtype=dtype) for rank in range(2)
    ]
    sources = [node.config.listen if way == "shared memory" else node.tcp]
    for rank in trainers:
        rank.fill(1)
    for version in (1, 2, 3):
        for rank in trainers:
            rank.client.publish(seq=version, token=1)
        by_delta = rollouts[0].client.pull(
            sources=sources,
            source="job/actor",
            seq=version,
            wants=rollouts[0].slices,
            delta=DeltaPolicy(block_bytes=64),
        )
        rollouts[1].pull(sources, version)
        assert bytes(rollouts[0].arena.buffer) == bytes(rollouts[1].arena.buffer)
        if version == 1:
            assert by_delta.bytes_moved == rollouts[0].nbytes
        else:
            assert 0 < by_delta.bytes_moved < 0.2 * rollouts[0].nbytes
        for rank in trainers:
            nudge(rank, version)
    for rank in (*trainers, *rollouts):
        rank.close()


def test_all_bytes_come_where_the_base_is_gone_or_most_has_changed(node: Daemon) -> None:
    trainer = Rank(node, "job/actor", 0, fsdp(0, 1))
    rollout = Rank(node, "job/rollout", 0, tensor_parallel(0, 1))

    def pulled(version: int) -> int:
        report = rollout.client.pull(
            sources=[node.tcp],
            source="job/actor",
            seq=version,
            wants=rollout.slices,
            delta=DeltaPolicy(),
        )
        assert rollout.holds(version)
        return report.bytes_moved

    trainer.publish(1)
    assert pulled(1) == rollout.nbytes
    # Every element of another version differs.
    trainer.publish(2)
    assert pulled(2) == rollout.nbytes
    trainer.client.publish(seq=3, token=1)
    trainer.client.publish(seq=4, token=1)
    rollout_bytes = rollout.client.pull(
        sources=[node.tcp], source="job/actor", seq=4, wants=rollout.slices, delta=DeltaPolicy()
    ).bytes_moved
    # Two versions are kept, and the one that the rollout holds is neither.
    assert rollout_bytes == rollout.nbytes
    assert rollout.holds(2)
    trainer.close()
    rollout.close()


def test_a_target_that_was_offloaded_meanwhile_holds_no_base(node: Daemon) -> None:
    trainer = Rank(node, "job/actor", 0, fsdp(0, 1))
    rollout = Rank(node, "job/rollout", 0, tensor_parallel(0, 1))
    trainer.publish(1)
    trainer.client.publish(seq=2, token=1)
    rollout.pull([node.tcp], 1)
    rollout.client.offload(SaveRequest(seq=1, token=1), parts=frozenset())
    report = rollout.client.pull(
        sources=[node.tcp], source="job/actor", seq=2, wants=rollout.slices, delta=DeltaPolicy()
    )
    assert report.bytes_moved == rollout.nbytes
    assert rollout.holds(1)
    trainer.close()
    rollout.close()

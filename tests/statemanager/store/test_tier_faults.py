"""Damaged files and full disks: typed errors, and state intact elsewhere."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from plexrl.errors import (
    ConflictError,
    CorruptStateError,
    StateLostError,
    StateTierFullError,
    StorageError,
)
from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES, DataPlane
from plexrl.statemanager.protocol.channel import close_all
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.messages import OpenState
from plexrl.statemanager.protocol.tickets import TicketRole
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.nvme import NvmeObjects, file_bytes
from plexrl.statemanager.store.tiers.tier import Tier
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    Daemon,
    MakeShard,
    Shard,
    StartDaemon,
    wait_until,
)

STATE = MIB // 2
"""State size of a shard from `make_shard`."""


BOUND_BY_PERMISSIONS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Starts a process of root without the capability to ignore permissions."""


@pytest.fixture
def spilled(start_daemon: StartDaemon, make_shard: MakeShard) -> tuple[Daemon, Shard]:
    """A daemon whose only version lies on NVMe, and the version's shard."""
    daemon = start_daemon(host_bytes=1)
    shard = make_shard(daemon)
    shard.fill(1)
    shard.offload(1)
    return daemon, shard


def flip_bit(path: Path, position: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)


def test_a_flipped_bit_on_nvme_is_refused(spilled: tuple[Daemon, Shard]) -> None:
    daemon, shard = spilled
    flip_bit(daemon.nvme_objects()[0], 4096 + STATE // 2)
    with pytest.raises(CorruptStateError, match="digest does not match in block 0") as caught:
        shard.load(1)
    assert caught.value.details == {"deployment": "job/actor", "rank": 0, "seq": 1}
    assert not shard.contents.any()


@pytest.mark.parametrize("kept_bytes", [4096, 4096 + STATE // 2, 4096 + STATE - 1])
def test_a_truncated_file_on_nvme_is_refused(
    spilled: tuple[Daemon, Shard], kept_bytes: int
) -> None:
    daemon, shard = spilled
    os.truncate(daemon.nvme_objects()[0], kept_bytes)
    for _ in ("live", "restarted"):
        with pytest.raises(CorruptStateError, match="is damaged"):
            shard.load(1)
        daemon.kill()
        daemon.start()


def test_a_deleted_file_is_refused(spilled: tuple[Daemon, Shard]) -> None:
    daemon, shard = spilled
    daemon.nvme_objects()[0].unlink()
    for _ in ("live", "restarted"):
        with pytest.raises(CorruptStateError, match="No such file"):
            shard.load(1)
        daemon.kill()
        daemon.start()


@pytest.mark.parametrize("position", [0, 8, 24, 100])
def test_a_version_with_a_damaged_header_is_removed(
    spilled: tuple[Daemon, Shard], position: int
) -> None:
    daemon, shard = spilled
    flip_bit(daemon.nvme_files()[0], position)
    daemon.kill()
    daemon.start()
    with pytest.raises(StateLostError):
        shard.load(1)
    assert not daemon.nvme_files()
    assert not daemon.nvme_objects(), "its object is unreferenced"


@pytest.mark.parametrize("position", [0, 8, 16, 30])
def test_an_object_with_a_damaged_header_is_refused(
    spilled: tuple[Daemon, Shard], position: int
) -> None:
    daemon, shard = spilled
    flip_bit(daemon.nvme_objects()[0], position)
    with pytest.raises(CorruptStateError, match="is damaged"):
        shard.load(1)


def test_damage_to_one_version_leaves_the_others_loadable(
    spilled: tuple[Daemon, Shard], make_shard: MakeShard
) -> None:
    daemon, shard = spilled
    other = make_shard(daemon, deployment="b/actor")
    expected = other.fill(2)
    other.offload(2)
    flip_bit(next(p for p in daemon.nvme_objects() if p.name.startswith("job")), 5000)
    with pytest.raises(CorruptStateError):
        shard.load(1)
    other.load(2)
    assert np.array_equal(other.contents, expected)


def test_a_damaged_published_version_is_not_pulled(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=STATE + MIB // 8)
    shard = make_shard(daemon)
    shard.client.publish(seq=1, token=1)
    shard.snapshot(1)
    [path] = daemon.nvme_objects()
    flip_bit(path, 5000)
    with pytest.raises(CorruptStateError, match="published version 1"):
        shard.client.pull(
            sources=[daemon.config.listen], source="job/actor", seq=1, wants=shard.slices[:1]
        )


def test_full_tiers_refuse_a_save_and_keep_the_arena(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    bound = STATE + MIB // 4
    daemon = start_daemon(host_bytes=bound, nvme_bytes=bound)
    shards = [make_shard(daemon, deployment=f"{name}/actor") for name in "abc"]
    expected = [shard.fill(index) for index, shard in enumerate(shards)]
    shards[0].offload(1)
    shards[1].offload(1)
    with pytest.raises(StateTierFullError, match="end a job or raise host_bytes"):
        shards[2].offload(1)
    assert np.array_equal(shards[2].contents, expected[2])
    for index in (0, 1):
        shards[index].load(1)
        assert np.array_equal(shards[index].contents, expected[index])
    shards[0].agent.release("a/actor")
    shards[2].offload(1)
    shards[2].load(1)
    assert np.array_equal(shards[2].contents, expected[2])


def test_superseded_versions_are_dropped_for_space(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    # Space for two and no NVMe: a third fits only because the middle one is superseded.
    daemon = start_daemon(host_bytes=2 * STATE + MIB // 4, nvme_bytes=1)
    shard = make_shard(daemon)
    for seq in (1, 2, 3):
        expected = shard.fill(seq)
        shard.snapshot(seq, keep_seq=1)
    shard.load(3)
    assert np.array_equal(shard.contents, expected)
    shard.load(1)


def test_a_full_file_system_refuses_a_save_and_keeps_the_arena(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    """The file systems are full, while the tiers' capacities are not reached."""
    daemon = start_daemon()
    large = make_shard(daemon, deployment="a/actor", elements=256 * 1024)
    small = make_shard(daemon, deployment="b/actor")
    kept = small.fill(1)
    small.offload(1)
    large.snapshot(1)
    daemon.limit_files(2 * STATE)
    expected = large.fill(2)

    def save_until_full() -> None:
        # The prefaulted memory equals the allocated memory, which is too little for three versions.
        for seq in range(2, 6):
            large.snapshot(seq, keep_seq=1)

    with pytest.raises(StateTierFullError, match=r"file system is full|has no space"):
        save_until_full()
    assert np.array_equal(large.contents, expected)
    usage = large.agent.usage()
    assert usage["nvme_bytes"] == 0
    assert not daemon.nvme_files()
    small.load(1)
    assert np.array_equal(small.contents, kept)


def test_a_spill_to_a_full_disk_keeps_the_version_in_the_host_tier(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=STATE + MIB // 4)
    first = make_shard(daemon, deployment="a/actor")
    second = make_shard(daemon, deployment="b/actor")
    kept, expected = first.fill(1), second.fill(2)
    first.offload(1)
    # The lock keeps the directory open, so its inode is not reused.
    Path(daemon.config.nvme_dir).rmdir()
    with pytest.raises(StorageError, match="cannot be written"):
        second.offload(2)
    assert np.array_equal(second.contents, expected)
    assert first.load(1).tier == "host"
    assert np.array_equal(first.contents, kept)


def test_memory_that_readers_use_cannot_be_evicted(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    """A version in use is not evicted, and a save does not wait for readers."""
    bound = STATE + MIB // 8
    daemon = start_daemon(host_bytes=bound, nvme_bytes=1)
    held, other = (make_shard(daemon, deployment=f"{name}/actor") for name in "ab")
    kept, expected = held.fill(1), other.fill(2)
    held.snapshot(1)
    request = OpenState(deployment="a/actor", seq=1)
    with connect(daemon.config.listen, DEADLINE_S, daemon.ticket(role=TicketRole.AGENT)) as reader:
        _, fds = exchange(reader, request)
        close_all(fds)
        # A released version is no longer named; its bytes count until the reader is done.
        held.agent.release("a/actor")
        for _ in range(3):
            with pytest.raises(StateTierFullError, match="not enough can be evicted"):
                other.offload(1)
        assert np.array_equal(other.contents, expected)
        assert not daemon.nvme_objects()
    wait_until(lambda: other.agent.usage()["host_bytes"] == 0)
    other.offload(1)
    other.load(1)
    assert np.array_equal(other.contents, expected)
    assert not np.array_equal(kept, expected)


def test_an_unreadable_file_is_refused_and_other_versions_load(
    spilled: tuple[Daemon, Shard], make_shard: MakeShard
) -> None:
    daemon, shard = spilled
    other = make_shard(daemon, deployment="b/actor")
    expected = other.fill(2)
    other.offload(2)
    path = next(p for p in daemon.nvme_objects() if p.name.startswith("job"))
    # Root ignores permissions, but cannot read a directory as a file.
    path.rename(path.with_suffix(".away"))
    path.mkdir()
    with pytest.raises(CorruptStateError, match=r"Is a directory|Invalid argument"):
        shard.load(1)
    other.load(2)
    assert np.array_equal(other.contents, expected)
    path.rmdir()
    path.with_suffix(".away").rename(path)
    shard.load(1)


def test_a_spill_to_an_unwritable_directory_keeps_the_state(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=1)
    if os.getuid() == 0:
        daemon.terminate()
        daemon.start(BOUND_BY_PERMISSIONS)
    shard = make_shard(daemon)
    expected = shard.fill(1)
    directory = Path(daemon.config.nvme_dir)
    directory.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written"):
        shard.offload(1)
    directory.chmod(0o700)
    assert np.array_equal(shard.contents, expected)
    shard.offload(1)


def test_two_daemons_do_not_share_a_directory(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="in use by another StateManager"):
        Tier(TierName.HOST, Path(daemon.config.host_dir))
    Tier(TierName.HOST, tmp_path / "free").close()


def test_a_worker_cannot_truncate_its_memory(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    for segment in shard.arena.segments:
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, 4096)
    shard.offload(1)
    shard.load(1)
    assert np.array_equal(shard.contents, expected)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, (4 << 20) + 1, (8 << 20) - 1])
def test_an_object_file_returns_any_number_of_bytes(tmp_path: Path, nbytes: int) -> None:
    contents = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    tier, plane = Tier(TierName.NVME, tmp_path / "tier"), DataPlane(queue_depth=2)
    objects = NvmeObjects(tier, plane)

    @contextmanager
    def source(start: int, count: int) -> Iterator[list[memoryview]]:
        with plane.buffer() as buffer:
            whole = -(-count // 4096) * 4096
            buffer.view[:whole] = contents[start : start + count].ljust(whole, b"\0")
            yield [buffer.view[:4096], buffer.view[4096:whole]]

    digests = objects.write("one", nbytes, source)
    assert (tier.directory / "one.object").stat().st_size == file_bytes("one", nbytes)
    found = bytearray()
    with objects.reading("one", nbytes) as reader, plane.buffer() as buffer:
        assert reader.digests == digests
        for start in range(0, nbytes, BLOCK_BYTES):
            whole = min(BLOCK_BYTES, -(-(nbytes - start) // 4096) * 4096)
            count = reader.read_block(start, [buffer.view[:whole]])
            found += buffer.view[:count]
    assert found == contents
    objects.remove("one")
    assert not list(tier.directory.iterdir())
    plane.close()
    tier.close()


def test_a_damaged_block_of_several_is_named(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start_daemon(host_bytes=1)
    shard = make_shard(daemon, elements=2 * MIB)
    shard.offload(1)
    flip_bit(daemon.nvme_objects()[0], 4096 + 9 * MIB)
    with pytest.raises(CorruptStateError, match="does not match in block 2"):
        shard.load(1)


MOVES: dict[str, Callable[[Shard], object]] = {
    "offload": lambda shard: shard.offload(2, token=2),
    "snapshot": lambda shard: shard.snapshot(2, token=2),
    "publish": lambda shard: shard.client.publish(seq=2, token=2),
    "load": lambda shard: shard.client.load(seq=1, token=2),
}


@pytest.mark.parametrize("move", sorted(MOVES))
def test_full_file_systems_refuse_every_move_and_change_nothing(
    daemon: Daemon, make_shard: MakeShard, move: str
) -> None:
    """Even the new fencing token cannot be recorded."""
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.snapshot(1)
    daemon.limit_files(0)
    for _ in range(2):
        with pytest.raises(StateTierFullError, match="is full"):
            MOVES[move](shard)
        assert np.array_equal(shard.contents, expected)
    # The new token was not recorded, so the previous one is still valid.
    assert shard.load(1).tier == "host"
    daemon.limit_files_no_more()
    MOVES[move](shard)
    shard.token = 2
    shard.load(2 if move in ("offload", "snapshot") else 1)
    assert np.array_equal(shard.contents, expected)
    leftovers = [p for p in Path(daemon.config.host_dir).iterdir() if p.suffix == ".part"]
    assert not leftovers


def test_a_worker_that_starts_while_the_file_systems_are_full_registers_later(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    shard = make_shard(daemon, registered=False, token=2)
    expected = shard.fill(1)
    daemon.limit_files(0)
    for _ in range(2):
        with pytest.raises(StateTierFullError, match="is full"):
            shard.register()
    assert np.array_equal(shard.contents, expected)
    daemon.limit_files_no_more()
    shard.register()
    shard.snapshot(1)
    shard.load(1)
    assert np.array_equal(shard.contents, expected)

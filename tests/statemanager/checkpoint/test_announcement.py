"""A load waits for the node that writes a checkpoint, in a directory and in a real S3 server, but
not for a node that is lost."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from plexrl.errors import CheckpointNotFoundError
from plexrl.statemanager.checkpoint.announcement import wait_until_written
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.statemanager.checkpoint.places.directory import DirectoryPlace
from plexrl.statemanager.checkpoint.restore import Checkpoint, read_record
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from tests.s3_server import S3Server, s3_server
from tests.statemanager.checkpoint import versions as v
from tests.statemanager.checkpoint.test_checkpoint_files import write

LOST_S = 0.1
POLLS = 8
TENSORS: v.Tensors = {v.key("w"): v.random_tensor(np.random.default_rng(5), "F32", (30, 17))}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment().items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(params=["directory", "objects"])
def at(server: S3Server, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the checkpoint is."""
    if request.param == "directory":
        return str(tmp_path / "job" / "c")
    return f"{server.url(request.node.originalname)}/job/c"


def save(at: str, seq: int, *, node: str = "n", progress: CheckpointProgress | None = None) -> None:
    """As the daemon of a node does."""
    place = place_at(at)
    place.announce(node)
    try:
        readers = v.versions(TENSORS, 1, seq=seq)
        write(at, readers, node=node, overwrite=True, progress=progress or CheckpointProgress())
    finally:
        place.announce_end(node)


def test_a_lost_node_fails_the_load_of_a_checkpoint_that_it_has_not_completed(at: str) -> None:
    place = place_at(at)
    place.announce("n")
    place.renew("n")
    with pytest.raises(CheckpointNotFoundError, match=r"'c' does not exist: node 'n'.*Save it"):
        wait_until_written(place, lost_s=LOST_S)
    assert place.announced(), "the node may come back: nobody has loaded something else"
    save(at, 1)
    assert not place.announced()
    wait_until_written(place, lost_s=LOST_S)
    assert read_record(at).seq == 1


def test_an_earlier_checkpoint_stays_when_the_node_that_replaces_it_is_lost(at: str) -> None:
    save(at, 1)
    place = place_at(at)
    place.announce("n")
    place.renew("n")
    draft = place.draft("n")
    draft.begin()
    draft.add("config.json", b"{}")
    wait_until_written(place, lost_s=LOST_S)
    assert read_record(at).seq == 1
    # Later loads find it at once, and a save on another node replaces it.
    assert not place.announced()
    place.announce("n")
    save(at, 2, node="m")
    wait_until_written(place, lost_s=LOST_S)
    assert read_record(at).seq == 2


def test_a_node_that_comes_back_does_not_publish_after_a_load_of_the_earlier_one(at: str) -> None:
    save(at, 1)

    class Stalled(CheckpointProgress):
        def add(self, nbytes: int) -> None:
            super().add(nbytes)
            if self.bytes_done == self.bytes_total:
                wait_until_written(place_at(at), lost_s=LOST_S)

    with pytest.raises(CheckpointNotFoundError, match=r"'n' did not renew.*save it again"):
        save(at, 2, progress=Stalled())
    with Checkpoint(at) as found:
        assert found.record.seq == 1
        found.verify(v.wanted(TENSORS, v.rows(TENSORS, 1)[0]))
    save(at, 3)
    assert read_record(at).seq == 3


@dataclass(frozen=True)
class Watched(DirectoryPlace):
    """Its node renews the announcement before each look, and publishes at the end."""

    looks: list[int]

    def announced(self) -> dict[str, str]:
        self.looks.append(1)
        if len(self.looks) < POLLS:
            self.renew("n")
        elif len(self.looks) == POLLS:
            save(str(self), 2)
        return super().announced()


def test_a_node_that_renews_its_announcement_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "job" / "c"
    save(str(path), 1)
    place = Watched(path, [])
    place.announce("n")
    # The pauses between the looks add up to many times this.
    wait_until_written(place, lost_s=LOST_S)
    assert len(place.looks) == POLLS
    assert read_record(str(path)).seq == 2

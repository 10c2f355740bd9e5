"""Options of `plexrl up`, accepted and refused."""

from pathlib import Path

import pytest
from sqlalchemy import make_url

from plexrl.cluster.config.options import ClusterOptions, PartSettings, check_argument
from plexrl.cluster.node.gpus import Gpus
from plexrl.cluster.node.parts import router_parts, scheduler_part, with_memory
from plexrl.errors import InvalidRequestError
from plexrl.process.folders.folders import Folders
from tests.small_disk import small_disk

VIRTUAL = Gpus(count=1, memory_bytes=0)


@pytest.mark.parametrize(
    "authority",
    [
        *("u:pw@h/db", "u:p[w@h/db", "u:p/w@h/db", "u:p?w@h/db", "u:p#w@h/db"),
        *("u@h/db?password=pw", "u@h/db?sslpassword=pw"),
    ],
)
def test_a_journals_password_is_found_anywhere_in_the_url(authority: str) -> None:
    url = f"postgresql://{authority}"
    found = make_url(url)
    assert found.password or found.query, "the journal is opened with it"
    with pytest.raises(InvalidRequestError, match="holds a password") as caught:
        check_argument(url)
    assert "w@" not in caught.value.message


@pytest.mark.parametrize("journal", ["postgresql://u@h/db?connect_timeout=3", "/data/a:b@c"])
def test_a_journal_without_a_password_may_be_an_argument(journal: str) -> None:
    check_argument(journal)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"policy": "tetris"}, "use one of isolated, pack, spread"),
        ({"ordering": "lifo"}, "use one of hrrs"),
        (
            {"pending_operations_max": 0},
            "pending_operations_max is 0; it must be a whole number, at least 1",
        ),
        ({"otlp_endpoint": "collector:4318"}, "is not a URL"),
        ({"journal": ""}, "give a path or postgresql"),
        ({"nodes": 3, "node_types": ("a", "b")}, "2 entries for 3 nodes"),
        ({"nodes": 3, "node_speeds": (1.0, 0.3)}, "2 entries for 3 nodes"),
        ({"node_speeds": (-0.5,)}, "node_speed is -0.5; it must be a number, at least 0"),
        ({"settings": PartSettings(rollout={"listen": ["tls://h:1"]})}, "which need certificates"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, object], names: str
) -> None:
    with pytest.raises(InvalidRequestError, match=names):
        ClusterOptions(data_dir=tmp_path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["postgresql://me@host/plexrl", "/somewhere/events.sqlite"])
def test_the_journal_may_be_outside_the_data_directory(tmp_path: Path, url: str) -> None:
    options = ClusterOptions(data_dir=tmp_path, journal=url)
    folders = Folders.of(tmp_path)
    folders.make()
    try:
        scheduler = scheduler_part(options, folders, "digest")
    finally:
        folders.remove()
    assert scheduler.config["journal"] == url


def test_routers_get_only_the_given_bounds(tmp_path: Path) -> None:
    options = ClusterOptions(data_dir=tmp_path, connections_max=99, header_timeout_s=1.5)
    (router,) = router_parts(options, Folders.of(tmp_path), [1])
    assert router.config["connections_max"] == 99
    assert router.config["header_timeout_s"] == 1.5
    assert "json_bytes_max" not in router.config


def test_a_host_tier_takes_at_most_shared_memory_and_too_little_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    usual = ClusterOptions(data_dir=tmp_path)
    with small_disk(root / "dev" / "shm", "65m"):
        too_large = ClusterOptions(data_dir=tmp_path, host_memory_bytes=1 << 30)
        with pytest.raises(InvalidRequestError, match=r"1\.00 GiB .* 0\.06 GiB: .*--shm-size"):
            with_memory(too_large, VIRTUAL, root)
        fitting = ClusterOptions(data_dir=tmp_path, host_memory_bytes=48 << 20)
        assert with_memory(fitting, VIRTUAL, root) == fitting
        assert with_memory(usual, VIRTUAL, root).host_memory_bytes == 65 << 20
    (root / "dev" / "shm").rmdir()
    with (
        small_disk(root / "dev" / "shm", "63m"),
        pytest.raises(InvalidRequestError, match=r"63\.0 MiB.* 64 MiB or larger .*--shm-size"),
    ):
        with_memory(usual, VIRTUAL, root)
    (root / "dev" / "shm").rmdir()
    assert with_memory(usual, VIRTUAL, root).host_memory_bytes == 2 << 30


def test_the_lease_defaults_to_the_schedulers(tmp_path: Path) -> None:
    folders = Folders.of(tmp_path)
    chosen = ClusterOptions(data_dir=tmp_path, lease_s=30.0)
    assert scheduler_part(chosen, folders, "digest").config["lease_s"] == 30.0
    usual = ClusterOptions(data_dir=tmp_path)
    assert "lease_s" not in scheduler_part(usual, folders, "digest").config

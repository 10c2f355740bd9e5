"""Configuration files: checked whole, shown, documented."""

import tomllib
from pathlib import Path

import pytest

from plexrl.cluster.config.file import read_cluster_file, read_node_file
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.config.reference import effective, reference
from plexrl.cluster.config.schema import (
    CLUSTER_FILE,
    MOVED,
    NODE_FILE,
    Section,
    field_docs,
)
from plexrl.errors import ConfigError
from tests.docs.pages import ROOT


def problems(path: Path, text: str) -> dict[str, str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(path)
    found = caught.value.details["problems"]
    assert isinstance(found, list)
    assert all(each["message"] in caught.value.message for each in found)
    return {each["path"]: each["message"] for each in found}


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference(), "run `plexrl config reference > docs/configuration.md`"


def test_every_setting_is_documented_and_required_ones_are_few() -> None:
    for section in (*CLUSTER_FILE, *NODE_FILE):
        assert set(section.settings()) <= set(field_docs(section.kind)), section.name
        assert set(section.required()) <= set(section.stand_ins), section.name


def test_every_option_of_a_cluster_has_one_place_in_the_file() -> None:
    tables = {section.name: section.settings() for section in CLUSTER_FILE}
    for name in ClusterOptions.__dataclass_fields__:
        if name in ("network", "settings", "events", "new_journal"):
            continue
        places = [table for table, names in MOVED.items() if name in names]
        assert len(places) + (name in tables["cluster"]) == 1, name
        assert all(name in tables[table] for table in places), name


def test_all_problems_of_a_file_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    found = problems(
        tmp_path / "cluster.toml",
        """
        loose = 1
        [cluster]
        nodes = 2
        blocks = ["a", "b", "c"]
        policy = "pack"
        virtual_gpus = 0
        host_memory_bytes = "3 parsecs"
        [scheduler]
        load_max = 30000
        horizon_slots = "many"
        burst_max_s = -1
        polcy = "pack"
        listen = ["unix:/x"]
        [ruter]
        json_bytes_max = 5
        [rollout]
        cycle_s = 0
        listen = ["tcp://0.0.0.0:1"]
        routers = ["http://localhost"]
        [statemanager]
        drain = 1
        moves_max = 0
        """,
    )
    assert set(found) == {
        *("loose", "ruter", "cluster.blocks", "cluster.policy", "cluster.virtual_gpus"),
        *("cluster.host_memory_bytes", "scheduler.load_max", "scheduler.horizon_slots"),
        *("scheduler.burst_max_s", "scheduler.polcy", "scheduler.listen"),
        *("rollout.cycle_s", "rollout.listen", "rollout.routers"),
        *("statemanager.drain", "statemanager.moves_max"),
    }
    assert "did you mean 'router'" in found["ruter"]
    assert "did you mean 'policy'" in found["scheduler.polcy"]
    assert "move it to [scheduler]" in found["cluster.policy"]
    assert "at most 1000" in found["scheduler.load_max"]


def test_a_required_setting_that_is_missing_is_reported(tmp_path: Path) -> None:
    found = problems(tmp_path / "cluster.toml", "[ray]\nnode_grace_s = 1\n[events]")
    assert set(found) == {"ray.address", "events.url"}


@pytest.mark.parametrize("text", ["[cluster", "a = 1\na = 2", "\0", "[cluster]\nnodes = 1e999x"])
def test_what_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    found = problems(tmp_path / "cluster.toml", text)
    assert "no TOML" in found[""]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster_file(tmp_path / "absent.toml")


def test_settings_reach_the_options_and_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        """
        [cluster]
        data_dir = "~/x"
        nvme_bytes = "1.5 TiB"
        [network]
        node_ports = [21000, 21999]
        fabric = "trusted"
        [scheduler]
        policy = "spread"
        burst_hold_s = 1
        [router]
        json_bytes_max = "1MiB"
        arriving_bytes_max = "2GiB"
        [rollout]
        cycle_s = 1
        listen = ["tls://0.0.0.0:8473"]
        [statemanager]
        drain = true
        tenant_limits = {alice = {total_bytes = 3}}
        [agent]
        threads = 2
        """
    )
    found = read_cluster_file(path)
    assert found.options["data_dir"] == Path.home() / "x"
    assert found.options["nvme_bytes"] == 3 << 39
    assert found.options["policy"] == "spread"
    assert found.options["json_bytes_max"] == 1 << 20
    assert found.network is not None
    assert found.network.node_ports == (21_000, 21_999)
    assert found.settings.scheduler == {"burst_hold_s": 1.0}
    assert found.settings.router == {"arriving_bytes_max": 2 << 30}
    assert found.settings.rollout == {"cycle_s": 1.0, "listen": ("tls://0.0.0.0:8473",)}
    assert found.settings.statemanager["drain"] is True
    assert found.settings.agent == {"threads": 2}
    ClusterOptions(**found.options, network=found.network, settings=found.settings)


def test_a_nodes_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[node]\nname = "gpu7"\ngpus = 8\nports = [20000, 20099]\n[agent]\nthreads = 4')
    found = read_node_file(path)
    assert found.options == {"name": "gpu7", "gpus": 8, "ports": (20_000, 20_099)}
    path.write_text("[node]\ngpus = -1\nports = [5, 4]\nfabric = 'ours'\nhost = '0.0.0.0'")
    with pytest.raises(ConfigError) as caught:
        read_node_file(path)
    for name in ("gpus", "ports", "fabric", "host"):
        assert f"node.{name}:" in caught.value.message


@pytest.mark.parametrize("section", [*CLUSTER_FILE, *NODE_FILE], ids=lambda each: each.name)
def test_an_empty_table_is_valid_and_gets_the_documented_defaults(section: Section) -> None:
    made = section.kind(**section.stand_ins)
    own = set(section.settings()) - set(section.stand_ins) - set(MOVED.get(section.name, ()))
    documented = section.defaults()
    assert own
    assert {name: getattr(made, name) for name in own} == {name: documented[name] for name in own}


def test_effective_values_are_valid_toml_without_secrets() -> None:
    journal = "postgresql://me:hunter2@host/plexrl?sslpassword=hunter3"
    text = effective({"scheduler": {"journal": journal, "load_max": 0.5}}, CLUSTER_FILE)
    assert "hunter" not in text
    shown = tomllib.loads(text)
    assert shown["scheduler"]["load_max"] == 0.5
    assert shown["cluster"]["nvme_bytes"] == "64GiB"
    assert "network" not in shown


def test_a_password_in_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.touch(mode=0o644)
    path.chmod(0o644)
    found = problems(path, '[scheduler]\njournal = "postgresql://me:pw@host/db"')
    assert "chmod 600" in found["scheduler.journal"]
    path.chmod(0o600)
    assert read_cluster_file(path).options["journal"].startswith("postgresql://")

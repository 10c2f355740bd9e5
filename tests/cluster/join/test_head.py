"""A head by its commands: tokens, joining without running, restarts, HTTPS. No node runs."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import plexrl
from plexrl.cluster.config.node_options import NodeOptions
from plexrl.cluster.join.authority import Authority, make_request
from plexrl.cluster.join.tokens import parse_token
from plexrl.cluster.node.membership import Kept, NodeFolder
from plexrl.cluster.node.supervisor import Entry, NodeSupervisor, join_once
from plexrl.errors import AuthenticationError, JoinTokenError, PermissionDeniedError
from plexrl.process.folders.folders import Folders
from plexrl.wire.links.address import TlsAddress, parse_address
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles
from plexrl.wire.links.dial import connect, connect_blocking
from plexrl.wire.links.handshakes import HANDSHAKES_MAX
from tests.cluster.join.machines import Machines, Running, run, run_any
from tests.half_open import half_open, is_ended


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    found = Machines(tmp_path_factory.mktemp("machines"))
    found.start_head()
    yield found
    found.close()


def join(machines: Machines, folder: Path, token: str, name: str) -> Kept:
    """Join without running the node."""
    head = parse_address(machines.found["join_address"])
    assert isinstance(head, TlsAddress)
    options = NodeOptions(data_dir=folder, name=name, virtual_gpus=1)
    return join_once(options, Entry(head=head, token=parse_token(token)))


def test_the_api_is_https_and_its_certificate_is_the_clusters(machines: Machines) -> None:
    assert machines.found["url"].startswith("https://127.0.0.2:")
    with machines.connect() as cluster:
        assert cluster.nodes() == []
    with pytest.raises(AuthenticationError, match="certificate"):
        plexrl.connect(machines.found["url"], machines.found["api_key"], timeout_s=0.5)


def test_commands_on_the_head_find_the_api_by_its_data_directory(machines: Machines) -> None:
    assert run("status", "--data-dir", str(machines.head_dir))["nodes"] == 0


def test_a_machine_joins_with_a_token_and_keeps_a_unit_without_it(
    machines: Machines, tmp_path: Path
) -> None:
    token, path = machines.cli_token(), tmp_path / "plexrl-node.service"
    file = tmp_path / "token"
    file.write_text(f"{token}\n")
    command = ["node", "join", machines.found["join_address"], "--virtual-gpus", "1"]
    command += ["--token-file", str(file)]
    command += ["--name", "joined-a", "--node-type", "h200", "--data-dir", str(tmp_path / "a")]
    found = run(*command, "--systemd", str(path))
    assert found == {"node": "joined-a", "unit": str(path)}
    unit = path.read_text()
    assert token not in unit
    assert "--name joined-a" in unit
    assert "--node-type h200" in unit
    assert f"--data-dir {tmp_path / 'a'}" in unit
    kept = NodeFolder(tmp_path / "a").read()
    assert kept is not None
    assert kept.node == "joined-a"
    for path in (tmp_path / "a").rglob("*"):
        is_empty = path.is_symlink() or path.stat().st_size == 0
        assert is_empty or not path.stat().st_mode & 0o077, path
        assert not path.is_file() or token.encode() not in path.read_bytes(), path
    # The same command line again, as of a restarted service, spends nothing and succeeds.
    assert join(machines, tmp_path / "a", token, "joined-a") == kept


def test_tokens_that_admit_nobody_are_refused(machines: Machines, tmp_path: Path) -> None:
    used = machines.token()
    join(machines, tmp_path / "b", used, "joined-b")
    revoked = machines.token()
    listed = run_any("node", "tokens", "--data-dir", str(machines.head_dir))
    assert isinstance(listed, list)
    assert listed[-2]["state"] == "used"
    assert listed[-2]["nodes"] == ["joined-b"]
    run("node", "token", "--data-dir", str(machines.head_dir), "--revoke", listed[-1]["id"])
    other = Authority.open(tmp_path / "authority").fingerprint
    foreign = f"plexrl1.{other}.{machines.token().rpartition('.')[2]}"
    for token, reason in ((used, "used"), (revoked, "revoked"), (foreign, "foreign")):
        with pytest.raises(JoinTokenError) as caught:
            join(machines, tmp_path / "c", token, "joined-c")
        assert caught.value.details["reason"] == reason
    assert not (tmp_path / "c" / "node.json").exists()


def test_a_refused_node_leaves_no_sockets_and_no_host_tier(
    machines: Machines, tmp_path: Path
) -> None:
    used = machines.token()
    join(machines, tmp_path / "g", used, "joined-g")
    head = parse_address(machines.found["join_address"])
    assert isinstance(head, TlsAddress)
    folders = Folders.of(tmp_path / "h")
    options = NodeOptions(data_dir=folders.data, name="joined-h", virtual_gpus=1)
    supervisor = NodeSupervisor(options, Entry(head=head, token=parse_token(used)))
    with pytest.raises(JoinTokenError, match="used"):
        asyncio.run(supervisor.run(asyncio.Event(), lambda _: None))
    assert not folders.run.exists()
    assert not folders.shared_memory.exists()


def test_a_token_for_two_admits_two(machines: Machines, tmp_path: Path) -> None:
    token = machines.token(uses=2)
    for name in ("joined-d", "joined-e"):
        join(machines, tmp_path / name, token, name)
    with pytest.raises(JoinTokenError, match="used"):
        join(machines, tmp_path / "f", token, "joined-f")


def test_a_restarted_head_knows_its_members_and_keeps_its_addresses(
    machines: Machines, tmp_path: Path
) -> None:
    token = machines.token()
    join(machines, tmp_path / "g", machines.token(), "joined-g")
    former = {name: machines.found[name] for name in ("url", "join_address", "ca")}
    assert machines.head is not None
    machines.head.kill()
    machines.start_head()
    assert {name: machines.found[name] for name in former} == former
    # The member's certificate is accepted, and the token of before is too.
    join(machines, tmp_path / "g", token, "joined-g")
    join(machines, tmp_path / "h", token, "joined-h")
    left = run("node", "leave", "--data-dir", str(tmp_path / "g"))
    assert left == {"node": "joined-g", "left": True}
    assert not (tmp_path / "g" / "certificates").exists()


def test_the_schedulers_port_accepts_only_certificates_of_the_cluster(
    machines: Machines, tmp_path: Path
) -> None:
    ports = json.loads((machines.head_dir / "network-ports.json").read_text())
    address = TlsAddress("127.0.0.2", ports[1])
    own = NodeFolder(tmp_path / "own")
    join(machines, tmp_path / "own", machines.token(), "joined-o")
    foreign = Authority.open(tmp_path / "x").issue(tmp_path / "x", Identity(Role.NODE, "joined-o"))

    async def connected(files: TlsFiles) -> Identity:
        link = await connect(address, Credentials(files), role=Role.SCHEDULER)
        link.writer.transport.abort()
        return link.peer

    assert asyncio.run(connected(own.certificates.tls)).role == Role.SCHEDULER
    with pytest.raises((AuthenticationError, OSError)):
        asyncio.run(connected(foreign))


def test_half_open_handshakes_at_each_port_keep_nobody_out(
    machines: Machines, tmp_path: Path
) -> None:
    """At the scheduler's, the join service's and the API's."""
    ports = json.loads((machines.head_dir / "network-ports.json").read_text())
    api = urlsplit(machines.found["url"]).port
    assert api is not None
    scheduler, *others = (TlsAddress("127.0.0.2", port) for port in (ports[1], ports[0], api))
    with ExitStack() as floods:
        flood = floods.enter_context(half_open(scheduler, HANDSHAKES_MAX + 50))
        for address in others:
            floods.enter_context(half_open(address, HANDSHAKES_MAX + 50))
        folder = tmp_path / "f"
        join(machines, folder, machines.token(), "joined-f")
        credentials = Credentials(NodeFolder(folder).certificates.tls)
        link, _ = connect_blocking(scheduler, credentials, role=Role.SCHEDULER)
        link.close()
        assert all(is_ended(raw) for raw in flood[:50])
        assert run("node", "leave", "--data-dir", str(folder))["left"]


def test_a_revoked_node_is_refused_by_the_running_scheduler_and_the_join_service(
    machines: Machines, tmp_path: Path
) -> None:
    ports = json.loads((machines.head_dir / "network-ports.json").read_text())
    address = TlsAddress("127.0.0.2", ports[1])
    folder = tmp_path / "r"
    join(machines, folder, machines.token(), "joined-r")
    stolen = Credentials(replace(NodeFolder(folder).certificates.tls, crl=""))

    async def talk() -> None:
        link = await connect(address, stolen, role=Role.SCHEDULER)
        done = await asyncio.to_thread(
            run, "node", "revoke", "joined-r", "--data-dir", str(machines.head_dir)
        )
        assert done == {"node": "joined-r", "certificates": 1}
        assert await link.reader.read() == b""
        with pytest.raises(AuthenticationError, match="revoked"):
            await connect(address, stolen, role=Role.SCHEDULER)

    asyncio.run(talk())
    with pytest.raises(PermissionDeniedError, match="no member"):
        join_once(NodeOptions(data_dir=folder, virtual_gpus=1), Entry())
    found = run("node", "revoke", "joined-r", "--data-dir", str(machines.head_dir), fails=True)
    assert found["code"] == "not_found"
    # The machine may become a node again.
    join(machines, folder, machines.token(), "joined-r")
    left = run("node", "leave", "--data-dir", str(folder))
    assert left == {"node": "joined-r", "left": True}


def test_an_operators_own_certificate_serves_the_api(tmp_path: Path) -> None:
    """And a replaced file is used for new connections without a restart."""
    own = Authority.open(tmp_path / "ca", "somebody else")
    key, request = make_request()
    identity = Identity(Role.ROUTER, "api")
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "cert.pem").write_bytes(own.sign(request, identity, ["127.0.0.2"]))
    found = Machines(tmp_path / "machines")
    try:
        found.start_head(
            *("--nodes", "0", "--tls-cert", str(tmp_path / "cert.pem")),
            *("--tls-key", str(tmp_path / "key.pem"), "--tls-ca", str(tmp_path / "ca" / "ca.pem")),
        )
        assert found.found["ca"] == str(tmp_path / "ca" / "ca.pem")
        with found.connect() as cluster:
            assert cluster.nodes() == []
        at = urlsplit(found.found["url"])
        served = ssl.get_server_certificate((str(at.hostname), int(at.port or 0)))
        assert served.split() == (tmp_path / "cert.pem").read_text().split()
        # The join service asks the API although the certificate is of another authority.
        join(found, tmp_path / "n", found.token(), "n")
    finally:
        found.close()


def test_a_file_configures_the_whole_cluster_and_options_override_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        f"""
        [cluster]
        data_dir = "{tmp_path / "elsewhere"}"
        host = "127.0.0.2"
        nodes = 0
        [network]
        join_port = 0
        scheduler_port = 0
        [scheduler]
        policy = "spread"
        burst_hold_s = 0.25
        [router]
        json_bytes_max = "1MiB"
        arriving_bytes_max = "3GiB"
        """
    )
    head = Running(tmp_path / "head", "up", "--config", str(path), "--policy", "isolated")
    try:
        found = head.ready()
        assert found["data_dir"] == str(tmp_path / "head"), "--data-dir overrides the file"
        folder = Folders.of(tmp_path / "head").run
        scheduler = json.loads((folder / "scheduler.json").read_text())
        assert (scheduler["policy"], scheduler["burst_hold_s"]) == ("isolated", 0.25)
        router = json.loads((folder / "router.json").read_text())
        assert (router["json_bytes_max"], router["arriving_bytes_max"]) == (1 << 20, 3 << 30)
    finally:
        head.end()
    path.write_text("[cluster]\nnodes = -1\n[scheduler]\npolcy = 'spread'\n")
    error = run("up", "--config", str(path), "--data-dir", str(tmp_path / "never"), fails=True)
    assert error["code"] == "invalid_config"
    places = [each["path"] for each in error["details"]["problems"]]
    assert sorted(places) == ["cluster.nodes", "scheduler.polcy"]
    assert not (tmp_path / "never").exists()
    assert run("config", "check", str(path), fails=True)["code"] == "invalid_config"

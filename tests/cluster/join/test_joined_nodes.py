"""A head and nodes that have joined it, by mutual TLS between addresses of their own: training over
two nodes, faults, and leaving. Nothing but these addresses joins them: each has a data directory of
its own."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import plexrl
from plexrl.cluster.join.authority import Authority
from plexrl.cluster.join.head import AUTHORITY_FOLDER
from plexrl.cluster.node.membership import NodeFolder
from plexrl.errors import ConflictError
from plexrl.wire.links.credentials import Credentials, Identity, Role
from tests.cluster.join.machines import Machines, run, wait_until
from tests.cluster.join.test_head import join
from tests.cluster.tools import VOCABULARY, train

pytestmark = pytest.mark.slow

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=6)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    found = Machines(tmp_path_factory.mktemp("machines"))
    found.start_head()
    for name in ("a", "b"):
        found.start_node(name)
    for node in found.nodes.values():
        node.ready()
    yield found
    found.close()


def trained(cluster: plexrl.Cluster, workers: int, steps: int = 2) -> list[float]:
    """Norms of the gradients of a few steps."""
    with cluster.create_job("across") as job:
        actor = job.train_deployment("actor", MODEL, workers=workers)
        return [train(actor, step).result(120).metrics["grad_norm"] for step in range(steps)]


def test_a_group_spans_two_joined_nodes_and_computes_the_same(machines: Machines) -> None:
    machines.wait_for_live("a", "b")
    with machines.connect() as cluster:
        with cluster.create_job("across") as job:
            actor = job.train_deployment("actor", MODEL, workers=2)
            norms = [train(actor, step).result(120).metrics["grad_norm"] for step in range(2)]
            ranks = actor.status()["ranks"]
        assert {rank["node"] for rank in ranks} == {"a", "b"}
        for rank in ranks:
            assert (rank["address"] or "").startswith(f"tls://{rank['node']}@127.")
        assert norms == pytest.approx(trained(cluster, workers=1), rel=1e-4)


def test_the_name_of_a_live_node_is_refused(machines: Machines, tmp_path_factory: object) -> None:
    assert isinstance(tmp_path_factory, pytest.TempPathFactory)
    with pytest.raises(ConflictError, match="live node"):
        join(machines, tmp_path_factory.mktemp("impostor") / "a", machines.token(), "a")


def test_a_killed_node_returns_with_its_certificate_and_state(machines: Machines) -> None:
    with machines.connect() as cluster, cluster.create_job("survivor") as job:
        actor = job.train_deployment("actor", MODEL, workers=2)
        first = train(actor, 0).result(120).metrics["grad_norm"]
        machines.nodes["a"].kill()
        machines.start_node("a").ready()
        machines.wait_for_live("a", "b")
        second = train(actor, 1).result(120)
        assert second.trainer_step == 2
        norms = [first, second.metrics["grad_norm"]]
    with machines.connect() as cluster:
        assert norms == pytest.approx(trained(cluster, workers=2), rel=1e-4)


def test_nodes_find_a_killed_head_again(machines: Machines) -> None:
    assert machines.head is not None
    machines.head.kill()
    machines.start_head()
    machines.wait_for_live("a", "b")
    with machines.connect() as cluster:
        assert len(trained(cluster, workers=2)) == 2


def test_a_node_leaves_after_its_work_has_moved_and_may_join_again(machines: Machines) -> None:
    with machines.connect() as cluster, cluster.create_job("mover") as job:
        actor = job.train_deployment("actor", MODEL, workers=1)
        norms = [train(actor, 0).result(120).metrics["grad_norm"]]
        (leaving,) = {rank["node"] for rank in actor.status()["ranks"]}
        (staying,) = {"a", "b"} - {leaving}
        found = run("node", "leave", "--data-dir", str(machines.node_dir(leaving)))
        assert found == {"node": leaving, "left": True}
        assert machines.nodes[leaving].close() == 0
        assert [each["node"] for each in cluster.nodes()] == [staying]
        norms.append(train(actor, 1).result(120).metrics["grad_norm"])
        assert {rank["node"] for rank in actor.status()["ranks"]} == {staying}
    machines.start_node(leaving).ready()
    machines.wait_for_live("a", "b")
    with machines.connect() as cluster:
        assert not any(each["is_draining"] for each in cluster.nodes())
        assert norms == pytest.approx(trained(cluster, workers=2), rel=1e-4)


def test_a_live_nodes_stolen_key_is_revoked_on_every_machine(machines: Machines) -> None:
    stolen = NodeFolder(machines.node_dir("b")).certificates.tls
    body = Path(stolen.certificate).read_bytes()
    serial = x509.load_pem_x509_certificate(body).serial_number
    found = run("node", "revoke", "b", "--data-dir", str(machines.head_dir))
    assert found["certificates"] >= 1
    # The other node hears of it from the scheduler; the revoked one is lost with its lease.
    kept = Credentials(NodeFolder(machines.node_dir("a")).certificates.tls)
    wait_until(lambda: serial in kept.revoked.serials, lambda: f"node a has {kept.revoked}")
    machines.wait_for_live("a")
    left = run("node", "leave", "--data-dir", str(machines.node_dir("b")))
    assert left == {"node": "b", "left": True}
    machines.nodes["b"].close()
    removed = run("nodes", "remove", "b", "--data-dir", str(machines.head_dir))
    assert removed == {"node": "b", "certificates_revoked": 0}
    machines.start_node("b").ready()
    machines.wait_for_live("a", "b")


def test_a_certificate_is_renewed_while_its_node_serves(machines: Machines) -> None:
    files = NodeFolder(machines.node_dir("b")).certificates
    machines.nodes["b"].end()
    authority = Authority.open(machines.head_dir / AUTHORITY_FOLDER)
    # The key stays, so that the head recognises the node; the certificate lives for seconds.
    request = _request_for(Path(files.tls.key))
    short = authority.sign(request, Identity(Role.NODE, "b"), life=timedelta(seconds=40))
    Path(files.tls.certificate).write_bytes(short)
    running = machines.start_node("b")
    running.ready()
    wait_until(
        lambda: Path(files.tls.certificate).read_bytes() != short, lambda: "it is not renewed"
    )
    assert files.renew_in() > timedelta(days=1)
    assert Credentials(files.tls).identity == Identity(Role.NODE, "b")
    # Its agent connects again with the new certificate, without a restart of the supervisor.
    (agent,) = [
        each
        for each in psutil.Process(running.process.pid).children()
        if "plexrl.worker" in " ".join(each.cmdline())
    ]
    agent.kill()
    machines.wait_for_live("a", "b")
    assert running.process.poll() is None


def _request_for(key: Path) -> bytes:
    read = serialization.load_pem_private_key(key.read_bytes(), None)
    assert isinstance(read, ec.EllipticCurvePrivateKey)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "plexrl")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(read, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)

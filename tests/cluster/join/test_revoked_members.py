"""Nodes whose membership ends: by the operator, by a successor of their name, or by themselves."""

import time
from pathlib import Path

import pytest
from cryptography import x509

from plexrl.cluster.join.authority import Authority
from plexrl.cluster.join.certificate_files import CertificateFiles
from plexrl.cluster.join.client import HeadClient
from plexrl.cluster.join.ledger import revoke
from plexrl.errors import JoinTokenError, NotFoundError, PermissionDeniedError
from plexrl.wire.links.credentials import Credentials
from tests.cluster.join.head_service import Head, become


def revoked(head: Head) -> set[int]:
    """Serial numbers in the head's list."""
    return {each.serial_number for each in x509.load_pem_x509_crl(head.ledger.crl.read_bytes())}


def serial(machine: CertificateFiles) -> int:
    """Of a machine's certificate."""
    body = Path(machine.tls.certificate).read_bytes()
    return x509.load_pem_x509_certificate(body).serial_number


def test_all_certificates_of_a_node_that_leaves_or_is_replaced_are_revoked(
    head: Head, machine: CertificateFiles, tmp_path: Path
) -> None:
    become(head, machine)
    first = serial(machine)
    told = head.run(lambda at: HeadClient(at, machine.tls).renew(machine.request()))
    machine.install(told.certificate, told.ca)
    second = serial(machine)
    assert revoked(head) == set()
    successor = CertificateFiles(tmp_path / "successor")
    become(head, successor)
    assert revoked(head) == {first, second}
    head.run(lambda at: HeadClient(at, successor.tls).leave())
    assert revoked(head) == {first, second, serial(successor)}


def test_a_repeated_request_to_join_revokes_nothing(head: Head, machine: CertificateFiles) -> None:
    token = head.token()
    head.join(token, files=machine)
    head.join(token, files=machine)
    assert revoked(head) == set()
    revoke(head.ledger, head.authority, "a")
    assert len(revoked(head)) == 2, "the answer that was lost had a certificate too"


def test_a_join_that_revokes_nothing_does_not_send_every_process_a_new_list(
    head: Head, machine: CertificateFiles
) -> None:
    before = head.ledger.crl.read_bytes()
    become(head, machine)
    assert head.ledger.crl.read_bytes() == before


def test_a_spent_token_does_not_bring_a_revoked_machine_back(
    head: Head, machine: CertificateFiles
) -> None:
    token = head.token()
    head.join(token, files=machine)
    revoke(head.ledger, head.authority, "a")
    with pytest.raises(JoinTokenError, match="used"):
        head.join(token, files=machine)
    assert head.ledger.read().nodes == {}


def test_a_revoked_certificate_is_refused_also_after_its_key_has_joined_again(
    head: Head, machine: CertificateFiles, tmp_path: Path
) -> None:
    joined = head.join(head.token(), files=machine)
    (tmp_path / "again").mkdir()
    pending = (tmp_path / "machine" / "pending.key").read_bytes()
    (tmp_path / "again" / "pending.key").write_bytes(pending)
    machine.install(joined.membership.certificate, joined.membership.ca)
    revoke(head.ledger, head.authority, "a")
    again = CertificateFiles(tmp_path / "again")
    become(head, again)
    with pytest.raises(PermissionDeniedError, match="is revoked"):
        head.run(lambda at: HeadClient(at, machine.tls).renew(machine.request()))
    assert head.run(lambda at: HeadClient(at, again.tls).renew()).certificate == ""


def test_a_renewal_forgets_certificates_that_have_expired(
    head: Head, machine: CertificateFiles
) -> None:
    become(head, machine)
    with head.ledger.change() as members:
        members.nodes["a"].certificates["abc"] = time.time() - 1.0
    head.run(lambda at: HeadClient(at, machine.tls).renew(machine.request()))
    kept = head.ledger.read().nodes["a"].certificates
    assert (len(kept), "abc" in kept) == (2, False)


def test_a_node_that_joins_another_head_starts_without_the_former_ones_revocations(
    head: Head, machine: CertificateFiles, tmp_path: Path
) -> None:
    become(head, machine)
    Path(machine.tls.crl).write_bytes(head.ledger.crl.read_bytes())
    (tmp_path / "second").mkdir()
    become(Head(tmp_path / "second"), machine)
    assert Credentials(machine.tls).revoked.number == 0


def test_an_operator_revokes_a_members_certificates_until_they_expire(
    head: Head, machine: CertificateFiles
) -> None:
    with pytest.raises(NotFoundError, match="no node 'a' has joined"):
        revoke(head.ledger, head.authority, "a")
    become(head, machine)
    assert revoke(head.ledger, head.authority, "a") == 1
    with pytest.raises(PermissionDeniedError, match="no member"):
        head.run(lambda at: HeadClient(at, machine.tls).renew())
    listed = x509.load_pem_x509_crl(head.ledger.crl.read_bytes())
    number = listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    with head.ledger.change() as members:
        (only,) = members.revoked
        members.revoked[only] = time.time() - 1.0
    head.ledger.publish(head.authority)
    listed = x509.load_pem_x509_crl(head.ledger.crl.read_bytes())
    assert len(listed) == 0
    assert listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number > number


def test_the_certificate_of_a_member_whom_an_earlier_version_admitted_can_be_revoked(
    head: Head, machine: CertificateFiles
) -> None:
    become(head, machine)
    with head.ledger.change() as members:
        members.nodes["a"].certificates = {}
    head.run(lambda at: HeadClient(at, machine.tls).renew())
    revoke(head.ledger, head.authority, "a")
    assert revoked(head) == {serial(machine)}


def test_a_list_is_written_anew_only_if_it_would_say_something_else(
    head: Head, machine: CertificateFiles, tmp_path: Path
) -> None:
    become(head, machine)
    revoke(head.ledger, head.authority, "a")
    before = head.ledger.crl.read_bytes()
    head.ledger.publish(head.authority)
    assert head.ledger.crl.read_bytes() == before
    other = Authority.open(tmp_path / "other")
    head.ledger.publish(other)
    assert other.is_current(x509.load_pem_x509_crl(head.ledger.crl.read_bytes()), revoked_ids(head))
    head.ledger.crl.write_text("damaged")
    head.ledger.publish(head.authority)
    assert revoked(head) == {serial(machine)}


def revoked_ids(head: Head) -> list[str]:
    return [f"{each:x}" for each in revoked(head)]

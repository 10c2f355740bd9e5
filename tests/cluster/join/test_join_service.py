"""The join service and its clients, over real TLS sockets."""

import asyncio
import base64
import os
import ssl
import time
from datetime import timedelta
from pathlib import Path

import pytest

from plexrl.cluster.join import messages
from plexrl.cluster.join.attempts import FAILURES_MAX
from plexrl.cluster.join.authority import CLOCK_SKEW, Authority
from plexrl.cluster.join.certificate_files import CertificateFiles
from plexrl.cluster.join.client import HeadClient, Joined, join
from plexrl.cluster.join.tokens import JoinToken, parse_token, revoke_token
from plexrl.errors import (
    AuthenticationError,
    ClockDifferenceError,
    ConflictError,
    InvalidRequestError,
    JoinTokenError,
    OverloadedError,
    PermissionDeniedError,
    UnavailableError,
)
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Credentials, Identity, Role
from tests.cluster.join.head_service import HOUR, Head, become


def test_a_token_admits_a_node_which_gets_its_certificate_and_the_clusters_settings(
    head: Head, machine: CertificateFiles
) -> None:
    joined = become(head, machine)
    assert Credentials(machine.tls).identity == Identity(Role.NODE, "a")
    assert joined.membership.schedulers == ["tls://127.0.0.1:1"]
    assert base64.b64decode(joined.membership.ticket_key) == b"k" * 32
    assert joined.host == "127.0.0.1"


def test_a_token_is_used_once_unless_it_says_more(head: Head) -> None:
    once, twice = head.token(), head.token(uses=2)
    head.join(once, "a")
    with pytest.raises(JoinTokenError, match="used") as caught:
        head.join(once, "b")
    assert caught.value.details["reason"] == "used"
    head.join(twice, "c")
    head.join(twice, "d")
    with pytest.raises(JoinTokenError, match="used"):
        head.join(twice, "e")


def test_a_request_whose_answer_was_lost_can_be_repeated(
    head: Head, machine: CertificateFiles
) -> None:
    token = head.token()
    head.join(token, files=machine)
    again = head.join(token, files=machine)
    machine.install(again.membership.certificate, again.membership.ca)
    assert len(head.ledger.read().tokens[0].admitted) == 1


def test_concurrent_requests_spend_a_single_token_once(head: Head, tmp_path: Path) -> None:
    token = head.token()
    requests = [CertificateFiles(tmp_path / f"m{at}").request() for at in range(8)]

    async def all_join(at: TlsAddress) -> list[object]:
        works = [join(at, token, node=f"n{i}", request=r) for i, r in enumerate(requests)]
        return list(await asyncio.gather(*works, return_exceptions=True))

    outcomes = head.run(all_join)
    assert sum(isinstance(each, Joined) for each in outcomes) == 1
    assert sum(isinstance(each, JoinTokenError) for each in outcomes) == 7


def test_expired_revoked_unknown_and_malformed_tokens_are_refused(head: Head) -> None:
    expired, revoked = head.token(), head.token()
    with head.ledger.change() as members:
        members.tokens[0].expires_at = time.time() - 1
    revoke_token(head.ledger, str(revoked))
    unknown = JoinToken(head.authority.fingerprint, "x" * 43)
    for token, reason in ((expired, "expired"), (revoked, "revoked"), (unknown, "unknown")):
        with pytest.raises(JoinTokenError) as caught:
            head.join(token)
        assert caught.value.details["reason"] == reason
    with pytest.raises(JoinTokenError, match="plexrl node token"):
        parse_token("plexrl1.abc.def")


def test_a_token_of_another_cluster_is_not_sent(head: Head, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    foreign = Head(tmp_path / "other").token()
    with pytest.raises(JoinTokenError, match="another cluster") as caught:
        head.join(foreign)
    assert caught.value.details["reason"] == "foreign"


def test_no_secret_is_in_the_heads_files(head: Head) -> None:
    token = head.token()
    head.join(token)
    for path in head.folder.rglob("*"):
        assert not path.is_file() or token.secret.encode() not in path.read_bytes(), path
    assert token.secret not in repr(token)


def test_the_name_of_a_live_node_is_refused_and_spends_nothing(head: Head) -> None:
    token = head.token()
    head.cluster.live = {"a"}
    with pytest.raises(ConflictError, match="live node"):
        head.join(token, "a")
    head.cluster.live = set()
    head.join(token, "a")


def test_a_name_of_the_head_or_an_invalid_one_is_refused(head: Head) -> None:
    with pytest.raises(ConflictError, match="head itself"):
        head.join(head.token(), "node0")
    for node in ("../x", "", "a b", "x" * 64):
        with pytest.raises(InvalidRequestError, match="no name for a node"):
            head.join(head.token(), node, files=CertificateFiles(head.folder / "m"))


def test_a_node_joins_only_when_the_cluster_can_say_whether_the_name_is_free(head: Head) -> None:
    token = head.token()
    head.cluster.answers = False
    with pytest.raises(UnavailableError, match="try again"):
        head.join(token)
    head.cluster.answers = True
    head.join(token)


@pytest.mark.parametrize("hours", [-6, 6])
def test_clocks_may_differ_by_hours(head: Head, hours: int) -> None:
    head.join(head.token(), clock=lambda: time.time() + hours * HOUR)
    assert list(head.ledger.read().nodes) == ["a"]


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_clock_that_is_far_off_is_named_and_spends_nothing(head: Head, hours: int) -> None:
    token = head.token()
    with pytest.raises(ClockDifferenceError) as caught:
        head.join(token, clock=lambda: time.time() + hours * HOUR)
    difference_s = caught.value.details["difference_s"]
    assert isinstance(difference_s, float)
    assert abs(difference_s - hours * HOUR) < 60
    head.join(token)


def test_a_renewal_needs_no_token_and_changes_key_and_certificate(
    head: Head, machine: CertificateFiles
) -> None:
    become(head, machine)
    former = Path(machine.tls.key).read_bytes()
    told = head.run(lambda at: HeadClient(at, machine.tls).renew(machine.request()))
    machine.install(told.certificate, told.ca)
    assert Path(machine.tls.key).read_bytes() != former
    told = head.run(lambda at: HeadClient(at, machine.tls).renew())
    assert told.certificate == ""


def test_a_renewal_whose_answer_was_lost_does_not_lock_the_node_out(
    head: Head, machine: CertificateFiles
) -> None:
    become(head, machine)
    certificates = []
    for _ in range(3):
        told = head.run(lambda at: HeadClient(at, machine.tls).renew(machine.request()))
        certificates.append(told.certificate)
    machine.install(told.certificate, told.ca)
    told = head.run(lambda at: HeadClient(at, machine.tls).renew(machine.request()))
    assert len({*certificates, told.certificate}) == 4
    assert Path(machine.tls.certificate).read_text() == certificates[-1]


def test_only_the_newest_machine_of_a_name_and_only_members_are_served(
    head: Head, machine: CertificateFiles, tmp_path: Path
) -> None:
    become(head, machine)
    successor = CertificateFiles(tmp_path / "successor")
    become(head, successor)
    with pytest.raises(PermissionDeniedError, match="another machine"):
        head.run(lambda at: HeadClient(at, machine.tls).renew())
    head.run(lambda at: HeadClient(at, successor.tls).leave())
    with pytest.raises(PermissionDeniedError, match="no member"):
        head.run(lambda at: HeadClient(at, successor.tls).renew())


def test_a_node_drains_itself_only_with_its_certificate(
    head: Head, machine: CertificateFiles
) -> None:
    become(head, machine)
    left = head.run(lambda at: HeadClient(at, machine.tls).drain())
    assert (left.gpus_reserved, head.cluster.draining) == (2, {"a"})
    head.run(lambda at: HeadClient(at, machine.tls).undrain())
    assert head.cluster.draining == set()
    with pytest.raises(AuthenticationError, match="certificate of a node"):
        head.run(lambda at: _without_certificate(at, messages.Drain()))


def test_certificates_of_others_are_refused(head: Head, tmp_path: Path) -> None:
    """A router's of this cluster, an expired one, and one of another cluster."""
    folder = tmp_path / "others"
    router = head.authority.issue(folder, Identity(Role.ROUTER, "r"))
    with pytest.raises(PermissionDeniedError, match="for nodes"):
        head.run(lambda at: HeadClient(at, router).renew())
    expired = head.authority.issue(folder, Identity(Role.NODE, "a"), life=timedelta(seconds=-1))
    with pytest.raises((AuthenticationError, UnavailableError)):
        head.run(lambda at: HeadClient(at, expired).renew())
    foreign = Authority.open(tmp_path / "x").issue(tmp_path / "x", Identity(Role.NODE, "a"))
    with pytest.raises((AuthenticationError, UnavailableError)):
        head.run(lambda at: HeadClient(at, foreign).renew())


def test_a_process_that_is_not_the_head_gets_no_secret(head: Head, tmp_path: Path) -> None:
    """Even with a certificate of the cluster: a node that answers at the head's address."""
    token, request = head.token(), CertificateFiles(tmp_path / "m").request()
    head.files = head.authority.issue(tmp_path / "tls", Identity(Role.NODE, "impostor"))
    with pytest.raises(AuthenticationError, match="not its join service"):
        head.run(lambda at: join(at, token, node="a", request=request))
    assert head.ledger.read().tokens[0].admitted == []


def test_many_failures_from_one_address_make_it_wait(head: Head) -> None:
    wrong = JoinToken(head.authority.fingerprint, "x" * 43)
    token, request = head.token(), CertificateFiles(head.folder / "m").request()

    async def attack(at: TlsAddress) -> None:
        for _ in range(FAILURES_MAX):
            with pytest.raises(JoinTokenError):
                await join(at, wrong, node="a", request=request)
        with pytest.raises(OverloadedError):
            await join(at, token, node="a", request=request)

    head.run(attack)


@pytest.mark.parametrize(
    "sent", [b"", b"\xff\xff\xff\xff", b"\0\0\0\4nope", os.urandom(5000), b"\0\0\0\2{}"]
)
def test_nonsense_ends_its_connection_and_nothing_else(head: Head, sent: bytes) -> None:
    async def disturb(at: TlsAddress) -> None:
        context = _untrusting()
        _, plain = await asyncio.open_connection(at.host, at.port)
        plain.write(sent)
        plain.transport.abort()
        _, writer = await asyncio.open_connection(at.host, at.port, ssl=context)
        writer.write(sent)
        writer.transport.abort()
        request = CertificateFiles(head.folder / "m").request()
        joined = await join(at, head.token(), node="a", request=request)
        assert joined.membership.certificate

    head.run(disturb)
    assert list(head.ledger.read().nodes) == ["a"]


def test_a_crash_while_certificates_are_replaced_leaves_the_former_ones(
    head: Head, machine: CertificateFiles, tmp_path: Path
) -> None:
    become(head, machine)
    # What a crash leaves: a new folder that the link does not name, and the pending key.
    (tmp_path / "machine" / "2").mkdir()
    (tmp_path / "machine" / "2" / "node.pem").write_text("half")
    machine.request()
    told = head.run(lambda at: HeadClient(at, machine.tls).renew(machine.request()))
    machine.install(told.certificate, told.ca)
    assert Credentials(machine.tls).identity.name == "a"


def test_a_certificate_is_renewed_after_two_thirds_of_its_life(
    head: Head, machine: CertificateFiles
) -> None:
    become(head, machine)
    assert timedelta(days=19) < machine.renew_in() < timedelta(days=21)
    assert timedelta(seconds=messages.CLOCK_DIFFERENCE_S_MAX) < CLOCK_SKEW


async def _without_certificate(at: TlsAddress, request: messages.JoinRequest) -> messages.Done:
    reader, writer = await asyncio.open_connection(at.host, at.port, ssl=_untrusting())
    try:
        await messages.write_message(writer, request)
        return messages.parse_answer(await messages.read_message(reader), messages.Done)
    finally:
        writer.transport.abort()


def _untrusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context

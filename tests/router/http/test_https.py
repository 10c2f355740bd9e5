"""The API over HTTPS: what the SDK and the CLI accept, limits on handshakes, new certificates."""

import asyncio
import random
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import plexrl
from plexrl import errors
from plexrl.cli.app import app
from plexrl.router.server.config import HttpsFiles
from plexrl.router.server.https import server_certificate
from plexrl.wire.links.credentials import Role, TlsFiles
from tests.certificates import TestAuthority
from tests.router.live_router import OPERATOR_KEY, LiveRouter, live_router

HOST = "127.0.0.1"
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    """The cluster's authority."""
    return TestAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def running(ours: TestAuthority) -> Iterator[LiveRouter]:
    with live_router(https_files=files_of(ours), connections_max=16) as router:
        yield router


@pytest.fixture
def router(running: LiveRouter, ours: TestAuthority) -> LiveRouter:
    """A router of this authority. It shows whatever certificate is in its file."""
    files_of(ours)
    return running


def files_of(authority: TestAuthority, host: str = HOST, days: int = 1) -> TlsFiles:
    return authority.files(Role.ROUTER, "r", hosts=(host,), life=timedelta(days=days))


def test_sdk_and_cli_accept_the_authority_that_they_are_given(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = str(router.ca)
    with plexrl.connect(router.url, OPERATOR_KEY, ca=ca) as cluster:
        assert cluster.status()["routers"] == 1

    async def ask() -> object:
        async with await plexrl.connect_async(router.url, OPERATOR_KEY, ca=ca) as cluster:
            return (await cluster.status())["routers"]

    assert asyncio.run(ask()) == 1
    monkeypatch.setenv("PLEXRL_API_KEY", OPERATOR_KEY)
    shown = CliRunner().invoke(app, ["status", "--url", router.url, "--ca-file", ca])
    assert shown.exit_code == 0, shown.output
    monkeypatch.setenv("PLEXRL_CA_FILE", ca)
    with plexrl.connect(router.url, OPERATOR_KEY) as cluster:
        assert cluster.status()["routers"] == 1


def test_a_certificate_that_is_not_accepted_is_an_error_that_says_how_to_mend_it(
    router: LiveRouter, ours: TestAuthority, tmp_path: Path
) -> None:
    theirs = TestAuthority(tmp_path / "theirs")
    for ca, told in ((None, "PLEXRL_CA_FILE"), (files_of(theirs).ca, "not of an authority in")):
        with pytest.raises(errors.AuthenticationError, match=told):
            plexrl.connect(router.url, OPERATOR_KEY, ca=ca)
    for host, days, told in (("head.example", 1, "host name or address"), (HOST, -1, "expired")):
        files_of(ours, host, days)
        with pytest.raises(errors.AuthenticationError, match=told):
            plexrl.connect(router.url, OPERATOR_KEY, ca=router.ca)


def test_a_ca_file_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for path in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
        with pytest.raises(errors.InvalidRequestError, match="PEM file"):
            plexrl.connect("https://127.0.0.1:1", OPERATOR_KEY, ca=path)


def test_clients_that_never_end_their_handshake_lock_nobody_out(router: LiveRouter) -> None:
    with ExitStack() as flood:
        for _ in range(64):
            flood.enter_context(socket.create_connection((HOST, router.port), PATIENCE_S))
        with plexrl.connect(router.url, OPERATOR_KEY, ca=router.ca) as cluster:
            assert cluster.status()["routers"] == 1
            for _ in range(64):
                flood.enter_context(socket.create_connection((HOST, router.port), PATIENCE_S))
            assert cluster.status()["routers"] == 1


def test_noise_in_place_of_a_handshake_ends_its_connection_and_nothing_else(
    router: LiveRouter,
) -> None:
    chance = random.Random(5)
    with plexrl.connect(router.url, OPERATOR_KEY, ca=router.ca) as cluster:
        assert cluster.status()["routers"] == 1
        for _ in range(20):
            with socket.create_connection((HOST, router.port), PATIENCE_S) as raw:
                raw.sendall(b"\xff" + chance.randbytes(chance.randrange(1, 2000)))
                with suppress(ConnectionResetError):
                    # At most an alert of TLS.
                    assert len(raw.recv(1 << 16)) < 16
                    assert raw.recv(1 << 16) == b""
        assert cluster.status()["routers"] == 1


def test_a_new_certificate_is_shown_without_a_restart_and_a_broken_one_is_not(
    router: LiveRouter, ours: TestAuthority
) -> None:
    def shown() -> str:
        return ssl.get_server_certificate((HOST, router.port), timeout=PATIENCE_S)

    file = Path(files_of(ours).certificate)
    first = file.read_text()
    assert shown().split() == first.split()
    files_of(ours)
    second = file.read_text()
    assert first != second
    assert shown().split() == second.split()
    file.write_text("broken")
    assert shown().split() == second.split()


def test_files_that_are_no_certificate_and_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequestError, match="PEM files"):
        server_certificate(HttpsFiles(certificate=str(tmp_path / "c"), key=str(tmp_path / "k")))
    (tmp_path / "c").write_text("x")
    (tmp_path / "k").write_text("x")
    with pytest.raises(errors.InvalidRequestError, match="PEM files"):
        server_certificate(HttpsFiles(certificate=str(tmp_path / "c"), key=str(tmp_path / "k")))


def test_old_versions_of_tls_are_refused(ours: TestAuthority) -> None:
    files = files_of(ours)
    context = server_certificate(HttpsFiles(certificate=files.certificate, key=files.key)).newest()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2

"""TLS, users and rights at a real Mosquitto."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plexrl.wire.links.credentials import Role, TlsFiles
from tests.certificates import TestAuthority
from tests.events.mosquitto import Mosquitto, Subscriber, mosquitto
from tests.events.scheduler import scheduler


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """A certificate of the broker and the authority that signed it."""
    return TestAuthority(tmp_path).files(Role.SCHEDULER, hosts=("127.0.0.1",))


@pytest.fixture
def guarded(tmp_path: Path, files: TlsFiles) -> Iterator[Mosquitto]:
    """A broker with TLS, the user `plexrl` who may do everything below `site`, and `reader`."""
    if mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    users, rights = tmp_path / "users", tmp_path / "rights"
    for user, more in (("plexrl", ["-c"]), ("reader", [])):
        command = ["mosquitto_passwd", *more, "-b", str(users), user, f"password of {user}"]
        subprocess.run(command, check=True)
    rights.write_text(
        "user plexrl\ntopic readwrite site/#\nuser reader\ntopic read site/jobs/#\n"
        "topic read site/scheduler\n"
    )
    broker = Mosquitto(
        tmp_path,
        *("allow_anonymous false", f"password_file {users}", f"acl_file {rights}"),
        *(f"cafile {files.ca}", f"certfile {files.certificate}", f"keyfile {files.key}"),
    )
    broker.start()
    yield broker
    broker.kill()


def test_tls_with_user_and_password(tmp_path: Path, guarded: Mosquitto, files: TlsFiles) -> None:
    (tmp_path / "password").write_text("password of plexrl\n")
    url = f"mqtts://plexrl@127.0.0.1:{guarded.port}/site"
    reader = {"user": "reader", "password": "password of reader", "ca": files.ca}
    with (
        Subscriber(guarded.port, "site/scheduler", **reader) as events,
        scheduler(tmp_path, url, password_file=str(tmp_path / "password"), ca=files.ca) as running,
    ):
        assert events.wait_state("site/scheduler", "online")["holder"] == "s"
        assert "password of" not in running.log
    assert "plexrl-site (p5, c1, k10, u'plexrl')" in guarded.log


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"password": "wrong"}, "Not authorized"),
        ({"ca": ""}, "certificate verify failed"),
        ({"ca": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_a_refused_connection_is_logged_and_the_scheduler_serves(
    tmp_path: Path, guarded: Mosquitto, files: TlsFiles, changes: dict[str, str], why: str
) -> None:
    url = f"mqtts://plexrl@127.0.0.1:{guarded.port}/site"
    given: dict[str, Any] = {"password": "password of plexrl", "ca": files.ca, **changes}
    with scheduler(tmp_path, url, **given) as running:
        asyncio.run(running.wait_log(why))
        asyncio.run(running.submit_job("j"))
        assert asyncio.run(running.jobs()) == ["j"]


def test_a_user_without_rights_is_told(tmp_path: Path, guarded: Mosquitto, files: TlsFiles) -> None:
    url = f"mqtts://reader@127.0.0.1:{guarded.port}/site"
    given: dict[str, Any] = {"password": "password of reader", "ca": files.ca, "timeout_s": 0.5}
    with scheduler(tmp_path, url, **given) as running:
        asyncio.run(running.wait_log("allow its user to read and write there"))

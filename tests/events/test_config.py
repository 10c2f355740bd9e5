"""The broker's configuration: what is refused, and with which words."""

from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.events.config import BrokerConfig, usable_broker
from plexrl.events.records import topic


def test_a_url_names_host_port_user_and_prefix() -> None:
    full = BrokerConfig(url="mqtts://plex%40rl@broker.example:8884/site/plexrl", password="p")
    assert (full.host, full.port, full.user) == ("broker.example", 8884, "plex@rl")
    assert (full.prefix, full.is_tls, full.read_password()) == ("site/plexrl", True, "p")
    short = BrokerConfig(url="mqtt://[::1]")
    assert (short.host, short.port, short.user) == ("::1", 1883, "")
    assert (short.prefix, short.is_tls, short.read_password()) == ("plexrl", False, None)
    assert BrokerConfig(url="mqtts://h").port == 8883


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"url": "broker:1883"}, "write mqtt://"),
        ({"url": "http://broker"}, "write mqtt://"),
        ({"url": "mqtt://"}, "write mqtt://"),
        ({"url": "mqtt://h:0"}, "write mqtt://"),
        ({"url": "mqtt://h:99999"}, "write mqtt://"),
        ({"url": "mqtt://h/p?x=1"}, "query or a fragment"),
        ({"url": "mqtt://h/a//b"}, "is no topic"),
        ({"url": "mqtt://h/a/%23"}, "is no topic"),
        ({"url": "mqtt://h/+"}, "is no topic"),
        ({"url": "mqtt://h/$SYS"}, "begins with \\$"),
        ({"url": "mqtt://u:hidden@h"}, "PLEXRL_MQTT_PASSWORD"),
        ({"url": "mqtt://h", "password": "p"}, "names no user"),
        ({"url": "mqtt://u@h", "password": "p", "password_file": "f"}, "one of them"),
        ({"url": "mqtt://h", "ca": "ca.pem"}, "write mqtts://"),
        ({"url": "mqtts://h", "certificate": "c.pem"}, "name both files"),
        ({"url": "mqtt://h", "queue_max": 1}, "queue_max"),
        ({"url": "mqtt://h", "interval_s": float("nan")}, "interval_s"),
        ({"url": "mqtt://h", "keepalive_s": 0}, "keepalive_s"),
    ],
)
def test_a_wrong_setting_is_refused(fields: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as refused:
        BrokerConfig(**fields)  # type: ignore[arg-type]  # wrong values on purpose
    assert "hidden" not in refused.value.message


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = BrokerConfig(url="mqtts://u@h", password_file=str(tmp_path / "no"), ca=__file__)
    with pytest.raises(InvalidRequestError, match=str(tmp_path / "no")):
        missing.read_password()
    with pytest.raises(InvalidRequestError, match=r"test_config\.py"):
        missing.tls_context()
    (tmp_path / "password").write_text(" p w\n")
    there = BrokerConfig(url="mqtts://u@h", password_file=str(tmp_path / "password"))
    assert there.read_password() == "p w"


def test_paths_of_a_broker_are_checked_and_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broker = BrokerConfig(url="mqtt://u@h", password_file="password")
    with pytest.raises(InvalidRequestError, match=str(tmp_path / "password")):
        usable_broker(broker)
    Path("password").write_text("of the file")
    usable = usable_broker(broker, "of the environment")
    assert usable.password_file == str(tmp_path / "password")
    assert (usable.password, usable.read_password()) == ("", "of the file")
    assert usable_broker(BrokerConfig(url="mqtt://u@h"), "of the environment").password


def test_no_name_adds_a_level_or_is_a_wildcard() -> None:
    assert topic("jobs", "a/b", "#") == "jobs/a%2Fb/%23"
    assert topic("nodes", "+") == "nodes/%2B"
    assert topic("nodes", "gpu-07.rack_2~x") == "nodes/gpu-07.rack_2~x"

"""A node that other machines reach needs ports, a certificate and an address of its own."""

from typing import Any

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.wire.links.credentials import TlsFiles
from plexrl.worker.interface.config import AgentConfig
from plexrl.worker.process.process_group import interface_of

TLS = TlsFiles(ca="ca", certificate="c", key="k")


def config(**changes: Any) -> AgentConfig:
    fields: dict[str, Any] = {
        "node": "n",
        "scheduler": ("unix:/tmp/s.sock",),
        "statemanager": "/tmp/sm.sock",
        "ticket_key_file": "/tmp/key",
        "gpus": 2,
        "gpu_memory_bytes": 1,
        "host_memory_bytes": 1,
        "run_dir": "/tmp",
        "rendezvous_dir": "/tmp",
        "data_dir": "/tmp",
        "host": "127.0.0.1",
        "ports": (7000, 7099),
        "tls": TLS,
        **changes,
    }
    return AgentConfig(**fields)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tls": None}, "no certificate"),
        ({"ports": (0, 0)}, "at least 16 ports"),
        ({"ports": (7000, 7014)}, "at least 16 ports"),
        ({"ports": (7000, 70_000)}, "65535"),
        ({"ports": (7100, 7000)}, "ports are 7100 to 7000"),
        ({"fabric": "open"}, "fabric is 'open'"),
    ],
)
def test_an_incomplete_configuration_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        config(**changes)


def test_workers_and_meeting_ranks_have_ports_of_their_own() -> None:
    found = config()
    first, last = found.meeting_ports
    assert (found.worker_ports, first, last) == (range(7000, 7075), 7075, 7099)
    assert config(host="", ports=(0, 0), tls=None).meeting_ports == (0, 0)


def test_an_address_of_another_machine_is_refused_with_those_of_this_one() -> None:
    assert interface_of("127.0.0.2") == "lo"
    with pytest.raises(
        InvalidRequestError, match=r"192\.0\.2\.7.*is no address of this machine.*127\.0\.0\.1"
    ):
        interface_of("192.0.2.7")

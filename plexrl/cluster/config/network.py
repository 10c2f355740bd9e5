"""Options of a cluster whose nodes are on several machines."""

import ipaddress
import re
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError

JOIN_PORT = 8471
SCHEDULER_PORT = 8472
NODE_PORTS = (20_000, 20_999)
FABRICS = ("", "trusted")
_PORT = (0, 65_535)
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """How other machines reach the head, and what proves who is who. Every link between machines is
    mutual TLS 1.3 with certificates of the cluster's authority."""

    advertise: str = ""
    """Name or address by which other machines reach the head; empty: `host`, or if that stands for
    all addresses, the address of the default route."""
    public_url: str = ""
    """URL that clients of the API use, if it is not that of the routers, as behind a proxy; several
    are separated by commas."""
    join_port: int = JOIN_PORT
    """Port at which nodes join and renew their certificates; 0: a free one, kept for later starts.
    """
    scheduler_port: int = SCHEDULER_PORT
    """Port of the scheduler for other machines; 0: as for `join_port`."""
    node_ports: tuple[int, int] = NODE_PORTS
    """First and last port of the workers and StateManagers of the head's own nodes. Other machines
    connect to them; the range lies below that of outgoing connections."""
    fabric: str = ""
    """`trusted` if nobody else can read or change the traffic between the machines: ranks of one
    group may then span machines, because collectives (gloo, NCCL) are not encrypted."""
    tls_cert: str = ""
    """PEM file of the API's certificate, followed by intermediate ones; empty: one of the cluster's
    authority."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_ca: str = ""
    """PEM file of the authority that clients need to trust `tls_cert`; empty: every machine trusts
    it already."""

    def __post_init__(self) -> None:
        for name in ("join_port", "scheduler_port"):
            check_port(name, getattr(self, name))
        check_ports("node_ports", self.node_ports)
        if self.join_port and self.join_port == self.scheduler_port:
            raise InvalidRequestError(f"scheduler_port is {self.join_port}, as is join_port")
        if self.advertise:
            check_host("advertise", self.advertise)
        check_fabric(self.fabric)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidRequestError("tls_cert and tls_key belong together: give both or neither")
        if self.tls_ca and not self.tls_cert:
            raise InvalidRequestError("tls_ca is the authority of tls_cert, which is absent")
        for url in filter(None, self.public_url.split(",")):
            if not url.startswith(("https://", "http://")):
                raise InvalidRequestError(
                    f"public_url {url!r} is no URL: write it as https://plexrl.example"
                )


def check_port(name: str, port: int) -> None:
    """Refuse a port that does not exist.

    Raises:
        InvalidRequestError: it is out of range.
    """
    if not _PORT[0] <= port <= _PORT[1]:
        raise InvalidRequestError(f"{name} is {port}: it must be at least 0 and at most 65535")


def check_ports(name: str, ports: tuple[int, int]) -> None:
    """Refuse a range of ports that is empty or does not exist.

    Raises:
        InvalidRequestError: as said.
    """
    first, last = ports
    if not 1 <= first <= last <= _PORT[1]:
        raise InvalidRequestError(
            f"{name} is {first}-{last}: give the first and the last port, such as 20000-20999"
        )


def parse_ports(name: str, text: str) -> tuple[int, int]:
    """The range in a text such as `20000-20999`.

    Raises:
        InvalidRequestError: the text is no range.
    """
    first, dash, last = text.partition("-")
    if not (dash and first.strip().isdigit() and last.strip().isdigit()):
        raise InvalidRequestError(
            f"{name} is {text!r}: give the first and the last port, such as 20000-20999"
        )
    ports = (int(first), int(last))
    check_ports(name, ports)
    return ports


def ports_text(ports: tuple[int, int]) -> str:
    """A range of ports as text."""
    return f"{ports[0]}-{ports[1]}"


def check_host(name: str, host: str) -> None:
    """Refuse what is neither an address of one machine nor a host name.

    Raises:
        InvalidRequestError: as said.
    """
    try:
        is_usable = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_usable = _HOST_NAME.fullmatch(host) is not None
    if not is_usable:
        raise InvalidRequestError(
            f"{name} is {host!r}: give the address or the name by which other machines reach this "
            "one"
        )


def check_fabric(fabric: str) -> None:
    """Refuse an unknown kind of fabric.

    Raises:
        InvalidRequestError: as said.
    """
    if fabric not in FABRICS:
        raise InvalidRequestError(
            f"fabric is {fabric!r}: write `trusted`, or leave it out if others use the network"
        )

"""Which proxy, if any, the environment names for a URL.

As `urllib`, `requests` and `httpx` read `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`,
with two differences. This machine's own addresses are always reached directly: no proxy leads back
to them. And an entry of `no_proxy` may be a network, such as `10.0.0.0/8`.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy, and the variable that names it."""

    url: str
    """May hold a password."""
    variable: str

    def __str__(self) -> str:
        """For messages: without a password."""
        scheme, _, rest = self.url.partition("://")
        return f"the proxy {scheme}://{rest.rpartition('@')[2]} of {self.variable}"


def proxy_for(url: str, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy that leads to `url`; None: it is reached directly."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_own_address(host):
        return None
    excepted = _value("no_proxy", environment)
    if excepted and _is_excepted(host, parts.port or DEFAULT_PORTS.get(parts.scheme), excepted[1]):
        return None
    for scheme in (parts.scheme, "all"):
        found = _value(f"{scheme}_proxy", environment)
        if found is not None:
            variable, value = found
            return Proxy(url=value if "://" in value else f"http://{value}", variable=variable)
    return None


def is_own_address(host: str) -> bool:
    """Whether a host, which is not looked up, is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # The system lets a socket have an address of this machine only.
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _value(name: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable's spelling and value; the small letters count if both are set."""
    for variable in (name, name.upper()):
        if variable in environment:
            value = environment[variable].strip()
            return (variable, value) if value else None
    return None


def _is_excepted(host: str, port: int | None, entries: str) -> bool:
    names = {host.lower(), f"{host.lower()}:{port}"}
    for entry in (entry.strip().lower() for entry in entries.split(",")):
        name = entry.removeprefix("*").removeprefix(".")
        if entry == "*" or (name and any(n == name or n.endswith(f".{name}") for n in names)):
            return True
        try:
            if ip_address(host) in ip_network(entry.strip("[]"), strict=False):
                return True
        except ValueError:
            continue
    return False

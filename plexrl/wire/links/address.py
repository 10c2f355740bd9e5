"""Addresses of processes.

    unix:/run/plexrl/scheduler.sock   a Unix socket of this machine
    tls://head.example:7400           mutual TLS
    tls://gpu3@10.0.0.3:40001         mutual TLS, with the process of node `gpu3` only

Plain TCP is not offered: every link that leaves a machine is authenticated and encrypted.
"""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from plexrl.errors import InvalidRequestError

UNIX = "unix:"
TLS = "tls://"
UNIX_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket, by the kernel's `sockaddr_un`."""
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket. The folder's permissions decide who may connect."""

    path: str

    def __str__(self) -> str:
        return f"{UNIX}{self.path}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """A TCP port with mutual TLS."""

    host: str
    port: int
    node: str = ""
    """The node that the certificate must name; empty: any."""

    def __str__(self) -> str:
        node = f"{quote(self.node, safe='')}@" if self.node else ""
        return f"{TLS}{node}{host_port(self.host, self.port)}"


Address = UnixAddress | TlsAddress


def host_port(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """The address that `str` of an address gives.

    Raises:
        InvalidRequestError: the text is not an address.
    """
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not path.startswith("/") or len(path.encode()) > UNIX_PATH_BYTES_MAX:
            raise InvalidRequestError(
                f"{text!r}: a Unix socket is unix:/absolute/path of at most "
                f"{UNIX_PATH_BYTES_MAX} bytes"
            )
        return UnixAddress(path)
    if text.startswith(TLS):
        return _tls_address(text)
    raise InvalidRequestError(
        f"{text!r} is no address: write unix:/path for a socket of this machine, or "
        "tls://HOST:PORT for another machine; plain TCP is not offered"
    )


def _tls_address(text: str) -> TlsAddress:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequestError(f"{text!r}: {error}: write tls://HOST:PORT") from error
    extra = parts.path or parts.query or parts.fragment or parts.password is not None
    if not host or port is None or extra or not _HOST.fullmatch(host):
        raise InvalidRequestError(f"{text!r}: write tls://HOST:PORT or tls://NODE@HOST:PORT")
    return TlsAddress(host, port, unquote(parts.username or ""))

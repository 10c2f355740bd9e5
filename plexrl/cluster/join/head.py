"""The head of a cluster of several machines: its certificates, its join service, its addresses.

authority/   key and certificate of the authority, join tokens, members, revoked certificates
tls/         certificates of the head's own processes, made anew at each start and renewed
"""

import asyncio
import base64
import ipaddress
import logging
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.data_dir.ports import choose_network_ports
from plexrl.cluster.join import messages
from plexrl.cluster.join.authority import CERTIFICATE, Authority
from plexrl.cluster.join.certificate_files import renewal_time
from plexrl.cluster.join.ledger import Ledger
from plexrl.cluster.join.service import JoinService
from plexrl.errors import (
    InvalidRequestError,
    NotFoundError,
    PlexRLError,
    UnavailableError,
    from_wire,
)
from plexrl.statemanager.protocol.ticket_key import make_ticket_key
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import (
    ROLLOUT,
    SCHEDULER,
    Identity,
    Role,
    TlsFiles,
    router_identity,
)

LOG = logging.getLogger(__name__)

AUTHORITY_FOLDER = "authority"
TLS_FOLDER = "tls"
TICKET_KEY = "ticket.key"
RENEWAL_CHECK_S = 3600.0
API_TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ClusterHead:
    """Certificates and addresses of one cluster. Constructing it makes the authority at the first
    start, and certificates for the head's processes."""

    def __init__(self, options: ClusterOptions, router_ports: Sequence[int]) -> None:
        """Raises:
        InvalidRequestError: no address for other machines was found.
        StorageError: the authority's files are damaged, or cannot be written.
        """
        assert options.network is not None
        self._options = options
        self._network = options.network
        self._data = options.data_dir
        self._router_ports = list(router_ports)
        self.authority = Authority.open(self._data / AUTHORITY_FOLDER)
        self.ledger = Ledger(self._data / AUTHORITY_FOLDER)
        self.advertised = advertised_host(options)
        self.join_port, self.scheduler_port = choose_network_ports(
            options.host,
            self._network.join_port,
            self._network.scheduler_port,
            self._data,
        )
        self._nodes = [f"node{index}" for index in range(options.nodes)]
        self._issued: dict[Identity, TlsFiles] = {}
        self.ledger.publish(self.authority)
        for identity in self._identities():
            self._issue(identity)

    @property
    def join_address(self) -> TlsAddress:
        """The address at which nodes join."""
        return TlsAddress(self.advertised, self.join_port)

    @property
    def scheduler_listen(self) -> str:
        """The address at which the scheduler listens for other machines."""
        return str(TlsAddress(self._options.host, self.scheduler_port))

    @property
    def public_urls(self) -> str:
        """URLs of the API for clients on other machines, separated by commas."""
        if self._network.public_url:
            return self._network.public_url
        host = f"[{self.advertised}]" if ":" in self.advertised else self.advertised
        return ",".join(f"https://{host}:{port}" for port in self._router_ports)

    @property
    def own_urls(self) -> str:
        """URLs of the API for processes of this machine that check its certificate."""
        # A certificate of the operator's own need not hold for 127.0.0.1.
        if self._network.tls_cert:
            return self.public_urls
        return self._options.url(self._router_ports)

    @property
    def api_ca(self) -> str:
        """PEM file that clients of the API must trust; empty: they do already."""
        if self._network.tls_cert:
            return self._network.tls_ca
        return str(self._data / TLS_FOLDER / CERTIFICATE)

    def files(self, identity: Identity) -> TlsFiles:
        """The certificate of one of the head's processes."""
        return self._issued[identity]

    def https(self, router: int) -> dict[str, str]:
        """Certificate and key of the API."""
        network = self._network
        if network.tls_cert:
            certificate, key = (
                str(Path(path).expanduser().resolve())
                for path in (network.tls_cert, network.tls_key)
            )
        else:
            files = self.files(router_identity(router))
            certificate, key = files.certificate, files.key
        return {"certificate": certificate, "key": key}

    def membership(self) -> messages.Membership:
        """The membership that every node gets."""
        make_ticket_key(self._data / TICKET_KEY)
        return messages.Membership(
            ca=self.authority.pem.decode(),
            schedulers=[str(TlsAddress(self.advertised, self.scheduler_port))],
            routers=self.public_urls.split(","),
            ticket_key=base64.b64encode((self._data / TICKET_KEY).read_bytes()).decode(),
            data_url=self._options.data_url or "",
            checkpoint_url=self._options.checkpoint_url or "",
        )

    async def serve(self, api_key: str) -> JoinService:
        """Start the join service.

        Raises:
            UnavailableError: its port cannot be listened on.
        """
        service = JoinService(
            self.authority,
            self.ledger,
            self.files(Identity(Role.HEAD)),
            _ApiView(self._options.url(self._router_ports).split(","), api_key, self.api_ca),
            self.membership,
            self._nodes,
        )
        await service.start(self._options.host, self.join_port)
        return service

    async def renew(self) -> None:
        """Renew certificates in time, until cancelled. Processes read the new files themselves."""
        while True:
            await asyncio.sleep(RENEWAL_CHECK_S)
            try:
                await asyncio.to_thread(self._renew_due)
            except (PlexRLError, OSError) as error:
                LOG.error("certificates of the head were not renewed: %s; trying again", error)

    def _renew_due(self) -> None:
        for identity in self._identities():
            if renewal_time(Path(self.files(identity).certificate)) <= datetime.now(UTC):
                self._issue(identity)
                LOG.info("the certificate of %s was renewed", identity)
        self.ledger.publish(self.authority)

    def _identities(self) -> list[Identity]:
        routers = [router_identity(index) for index in range(len(self._router_ports))]
        nodes = [Identity(Role.NODE, name) for name in self._nodes]
        return [Identity(Role.HEAD), SCHEDULER, ROLLOUT, *routers, *nodes]

    def _issue(self, identity: Identity) -> None:
        hosts = {self.advertised, socket.gethostname(), *LOOPBACK}
        if not is_unspecified(self._options.host):
            hosts.add(self._options.host)
        files = self.authority.issue(self._data / TLS_FOLDER, identity, sorted(hosts))
        self._issued[identity] = replace(files, crl=str(self.ledger.crl))


def advertised_host(options: ClusterOptions) -> str:
    """The name or address by which other machines reach this one.

    Raises:
        InvalidRequestError: none was found.
    """
    assert options.network is not None
    if options.network.advertise:
        return options.network.advertise
    if not is_unspecified(options.host):
        return options.host
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    probe = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            # Nothing is sent; the kernel chooses the address of the route.
            sock.connect((probe, 9))
        except OSError as error:
            raise InvalidRequestError(
                f"this machine has no default route ({error}): give the address by which other "
                "machines reach it with --advertise"
            ) from error
        return str(sock.getsockname()[0])


def is_unspecified(host: str) -> bool:
    """Whether `host` stands for all addresses of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class _ApiView:
    """The cluster as its API shows it to the operator."""

    def __init__(self, urls: Sequence[str], api_key: str, ca: str) -> None:
        self._urls = list(urls)
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._ca = ca

    async def live_nodes(self) -> set[str]:
        """Names of the nodes whose agent is connected.

        Raises:
            UnavailableError: no router answers.
        """
        found = await self._ask("GET", "/v1/nodes")
        return {node["node"] for node in found["nodes"] if node["alive"]}

    async def remove(self, node: str) -> None:
        """Forget a node that has no work.

        Raises:
            UnavailableError: it has work, or no router answers.
        """
        with suppress(NotFoundError):
            await self._ask("DELETE", f"/v1/nodes/{node}")

    async def drain(self, node: str, *, is_draining: bool) -> messages.DrainProgress:
        """Begin or end a drain.

        Raises:
            NotFoundError: there is no such node.
            UnavailableError: no router answers.
        """
        action = "drain" if is_draining else "undrain"
        found = await self._ask("POST", f"/v1/nodes/{node}/{action}")
        return messages.DrainProgress(
            gpus_reserved=int(found["gpus_reserved"]), groups=list(found.get("groups", ()))
        )

    async def _ask(self, method: str, path: str) -> dict[str, Any]:
        import httpx

        failure = "there is no router"
        async with httpx.AsyncClient(
            verify=await asyncio.to_thread(self._context),
            headers=self._headers,
            timeout=API_TIMEOUT_S,
            trust_env=False,
        ) as client:
            for url in self._urls:
                try:
                    reply = await client.request(method, url + path)
                    body = reply.json()
                except (httpx.HTTPError, ValueError) as error:
                    failure = str(error) or type(error).__name__
                    continue
                if reply.is_success:
                    return dict(body)
                refusal = from_wire(body.get("error", body))
                if isinstance(refusal, NotFoundError):
                    raise refusal
                failure = refusal.message
        raise UnavailableError(f"the cluster does not answer: {failure}", retry_after_s=2.0)

    def _context(self) -> ssl.SSLContext:
        # The routers are on this machine, by an address that their certificate may not have.
        context = ssl.create_default_context(cafile=self._ca or None)
        context.check_hostname = False
        return context

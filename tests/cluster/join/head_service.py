"""A head's join service on a port of this machine, without a cluster."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from plexrl.cluster.join import messages
from plexrl.cluster.join.authority import Authority
from plexrl.cluster.join.certificate_files import CertificateFiles
from plexrl.cluster.join.client import Joined, join
from plexrl.cluster.join.ledger import Ledger
from plexrl.cluster.join.service import JoinService
from plexrl.cluster.join.tokens import JoinToken, create_token
from plexrl.errors import UnavailableError
from plexrl.wire.links.address import TlsAddress
from plexrl.wire.links.credentials import Identity, Role

ResultT = TypeVar("ResultT")
HOUR = 3600.0


class Cluster:
    """The cluster's answers, which the tests set."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.draining: set[str] = set()
        self.answers = True

    async def live_nodes(self) -> set[str]:
        if not self.answers:
            raise UnavailableError("the router starts")
        return self.live

    async def remove(self, node: str) -> None:
        self.live.discard(node)

    async def drain(self, node: str, *, is_draining: bool) -> messages.DrainProgress:
        (self.draining.add if is_draining else self.draining.discard)(node)
        return messages.DrainProgress(gpus_reserved=2, groups=["group0"])


class Head:
    """A head: authority, ledger and a service on a port of this machine."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.open(folder / "authority")
        self.ledger = Ledger(folder)
        self.ledger.publish(self.authority)
        self.cluster = Cluster()
        self.files = self.authority.issue(folder / "tls", Identity(Role.HEAD))
        self.folder = folder

    def service(self) -> JoinService:
        return JoinService(
            self.authority, self.ledger, self.files, self.cluster, self.told, reserved=("node0",)
        )

    def told(self) -> messages.Membership:
        return messages.Membership(
            ca=self.authority.pem.decode(),
            schedulers=["tls://127.0.0.1:1"],
            routers=["https://127.0.0.1:2"],
            ticket_key=base64.b64encode(b"k" * 32).decode(),
        )

    def token(self, *, ttl_s: float = HOUR, uses: int = 1) -> JoinToken:
        return create_token(self.ledger, self.authority.fingerprint, ttl_s=ttl_s, uses=uses)[0]

    def run(self, use: Callable[[TlsAddress], Awaitable[ResultT]]) -> ResultT:
        """Run `use` with the address of the running service."""

        async def main() -> ResultT:
            service = self.service()
            port = await service.start("127.0.0.1", 0)
            try:
                return await use(TlsAddress("127.0.0.1", port))
            finally:
                await service.close()

        return asyncio.run(main())

    def join(
        self,
        token: JoinToken,
        node: str = "a",
        *,
        files: CertificateFiles | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Joined:
        folder = files or CertificateFiles(self.folder / "joining" / node)
        request = folder.request()
        return self.run(lambda at: join(at, token, node=node, request=request, clock=clock))


def become(head: Head, machine: CertificateFiles, node: str = "a") -> Joined:
    joined = head.join(head.token(), node, files=machine)
    machine.install(joined.membership.certificate, joined.membership.ca)
    return joined

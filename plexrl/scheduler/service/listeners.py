"""The scheduler's listening addresses: Unix sockets for its own machine, TLS ports for others."""

import socket

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.wire.links.address import Address, TlsAddress, UnixAddress, parse_address
from plexrl.wire.links.credentials import Credentials, RevocationList, Role
from plexrl.wire.links.dial import OnLink, Server, connect, serve

ROLES = (Role.ROUTER, Role.NODE)
"""Processes of other machines that may connect."""


class Listeners:
    """Listens at all addresses of the configuration, or at none."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises:
        InvalidRequestError: the TLS files cannot be used.
        """
        self._addresses = [parse_address(text) for text in config.listen]
        self._credentials = None if config.tls is None else Credentials(config.tls)
        if self._credentials is not None and self._credentials.identity.role != Role.SCHEDULER:
            raise InvalidRequestError(
                f"the certificate in `tls` is that of {self._credentials.identity}: give the "
                "scheduler a certificate of its own"
            )
        self._servers: list[Server] = []

    @property
    def addresses(self) -> list[str]:
        """The addresses, with the ports that the system chose while it listens."""
        chosen = [server.address for server in self._servers]
        return [str(address) for address in chosen or self._addresses]

    @property
    def revoked(self) -> RevocationList:
        """The certificates that are refused."""
        return RevocationList() if self._credentials is None else self._credentials.revoked

    async def open(self, on_link: OnLink) -> None:
        """Listen.

        Raises:
            ConflictError: an address cannot be listened on; it listens at none.
        """
        for address in self._addresses:
            try:
                self._servers.append(await serve(address, self._credentials, on_link, roles=ROLES))
            except OSError as error:
                self.close()
                raise ConflictError(
                    f"the scheduler cannot listen at {address}: {error}: end the process that "
                    "listens there, or choose another port"
                ) from error

    def close(self) -> None:
        """Stop listening; open links go on."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def is_served_by_another(self) -> bool:
        """Whether another process listens at one of the addresses."""
        for address in self._addresses:
            if await _is_served(address):
                return True
        return False


async def _is_served(address: Address) -> bool:
    if isinstance(address, UnixAddress):
        try:
            link = await connect(address, None, role=Role.SCHEDULER)
        except OSError:
            return False
        link.writer.close()
        return True
    return not _is_free(address)


def _is_free(address: TlsAddress) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError:
            return False
    return True

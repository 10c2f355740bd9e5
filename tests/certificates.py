"""Certificates for tests: authorities, and TLS files of any identity."""

from datetime import timedelta
from pathlib import Path

from plexrl.cluster.join.authority import LIFE, Authority
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles


class TestAuthority:
    """A cluster's authority in a temporary folder."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = Authority.open(folder / "authority")

    def files(
        self, role: Role, name: str = "", *, hosts: tuple[str, ...] = (), life: timedelta = LIFE
    ) -> TlsFiles:
        """TLS files of a process; made again at each call."""
        return self.authority.issue(self._folder / "tls", Identity(role, name), hosts, life)

    def credentials(self, role: Role, name: str = "", *, life: timedelta = LIFE) -> Credentials:
        """Credentials of a process."""
        return Credentials(self.files(role, name, life=life))

"""Certificates for tests: authorities, and TLS files of any identity."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from cryptography import x509

from plexrl.cluster.join.authority import LIFE, Authority
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles


class TestAuthority:
    """A cluster's authority in a temporary folder."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = Authority.open(folder / "authority")
        self.crl = folder / "crl.pem"
        """The list of revoked certificates, of all processes; absent until the first `revoke`."""

    def files(
        self, role: Role, name: str = "", *, hosts: tuple[str, ...] = (), life: timedelta = LIFE
    ) -> TlsFiles:
        """TLS files of a process; made again at each call."""
        files = self.authority.issue(self._folder / "tls", Identity(role, name), hosts, life)
        return replace(files, crl=str(self.crl))

    def credentials(self, role: Role, name: str = "", *, life: timedelta = LIFE) -> Credentials:
        """Credentials of a process."""
        return Credentials(self.files(role, name, life=life))

    def revoked(self, *files: TlsFiles) -> str:
        """A list (PEM) with the present certificates of these processes."""
        certificates = [
            x509.load_pem_x509_certificate(Path(each.certificate).read_bytes()) for each in files
        ]
        serials = [f"{each.serial_number:x}" for each in certificates]
        return self.authority.revoke(serials, time.time_ns()).decode()

    def revoke(self, *files: TlsFiles) -> None:
        """Replace the list by `revoked(*files)`."""
        part = self.crl.with_suffix(".new")
        part.write_text(self.revoked(*files))
        part.rename(self.crl)

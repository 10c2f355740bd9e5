"""A node's key, certificate and authority: files that are replaced together.

    current -> 3/           the files in use, by a link that is replaced at once
    3/ca.pem  3/node.pem  3/node.key
    pending.key             key of a request whose answer has not arrived
    crl.pem                 revoked certificates of other nodes, as the scheduler last sent them

A crash leaves the former or the new files, never a certificate with the wrong key. A request that
is repeated after a crash has the same key, so that the head recognises it.
"""

import hashlib
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from plexrl.cluster.join.authority import CLOCK_SKEW, make_request
from plexrl.errors import StorageError
from plexrl.process.folders.durable_files import rename_durably
from plexrl.process.folders.operator_key import write_private
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.wire.links.credentials import TlsFiles

CURRENT = "current"
PENDING = "pending.key"
RENEWED_AT = 2 / 3
"""Part of a certificate's life after which it is renewed; the rest is for a head that is away."""


class CertificateFiles:
    """The files in one private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def tls(self) -> TlsFiles:
        """Paths that stay the same while the files are replaced."""
        current = self._folder / CURRENT
        return TlsFiles(
            ca=str(current / "ca.pem"),
            certificate=str(current / "node.pem"),
            key=str(current / "node.key"),
            crl=str(self._folder / "crl.pem"),
        )

    @property
    def exist(self) -> bool:
        """Whether this machine has a certificate."""
        return (self._folder / CURRENT / "node.pem").exists()

    def fingerprint(self) -> str:
        """SHA-256 of the authority, as in join tokens; empty if this machine has no certificate."""
        try:
            body = ssl.PEM_cert_to_DER_cert(Path(self.tls.ca).read_text())
        except (OSError, ValueError):
            return ""
        return hashlib.sha256(body).hexdigest()

    def request(self) -> bytes:
        """A signing request (PEM) for the pending key, which is made if there is none.

        Raises:
            StorageError: the folder cannot be written.
        """
        make_private_folder(self._folder)
        path = self._folder / PENDING
        try:
            if not path.exists():
                key, request = make_request()
                write_private(path, key.decode())
                return request
            read = serialization.load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{path} cannot be used ({error}): remove it and try again", path=str(path)
            ) from error
        assert isinstance(read, ec.EllipticCurvePrivateKey)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "plexrl")])
        request_for = x509.CertificateSigningRequestBuilder().subject_name(name)
        signed = request_for.sign(read, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def install(self, certificate: str, ca: str) -> None:
        """Put a certificate for the pending key in use.

        Raises:
            StorageError: the folder cannot be written.
        """
        pending = self._folder / PENDING
        former = self._numbers()
        new = self._folder / str(max(former, default=0) + 1)
        try:
            if self.exist and Path(self.tls.ca).read_text() != ca:
                # Processes refuse a list of an authority that they do not trust.
                Path(self.tls.crl).unlink(missing_ok=True)
            make_private_folder(new)
            for name, text in (
                ("ca.pem", ca),
                ("node.pem", certificate),
                ("node.key", pending.read_text()),
            ):
                write_private(new / name, text)
            link = self._folder / f"{CURRENT}.new"
            link.unlink(missing_ok=True)
            link.symlink_to(new.name)
            rename_durably(link, self._folder / CURRENT)
            pending.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"the certificate cannot be stored in {new}: {error}") from error
        # The files before these stay for processes that are reading them now.
        for number in sorted(former)[:-1]:
            shutil.rmtree(self._folder / str(number), ignore_errors=True)

    def remove(self) -> None:
        """Delete all files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def renew_in(self) -> timedelta:
        """Time until the certificate should be renewed, zero or less if that is due.

        Raises:
            StorageError: the certificate cannot be read.
        """
        return renewal_time(Path(self.tls.certificate)) - datetime.now(UTC)

    def _numbers(self) -> list[int]:
        return [int(each.name) for each in self._folder.iterdir() if each.name.isdigit()]


def renewal_time(certificate: Path) -> datetime:
    """When a certificate should be renewed.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"the certificate {certificate} cannot be read: {error}") from error
    begins = read.not_valid_before_utc + CLOCK_SKEW
    return begins + RENEWED_AT * (read.not_valid_after_utc - begins)

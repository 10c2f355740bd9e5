"""The cluster's certificate authority: a key and a certificate in a folder of the head.

Certificates are valid from `CLOCK_SKEW` before they are made, because clocks of machines differ.
"""

import hashlib
import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from plexrl.errors import InvalidRequestError, StorageError
from plexrl.process.folders.operator_key import write_private
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.wire.links.credentials import Identity, TlsFiles

CERTIFICATE = "ca.pem"
KEY = "ca.key"
AUTHORITY_LIFE = timedelta(days=3650)
LIFE = timedelta(days=30)
"""Validity of a process's certificate; it is renewed long before."""
CLOCK_SKEW = timedelta(days=1)


class Authority:
    """Signs certificates."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def open(cls, folder: Path, cluster: str = "plexrl") -> "Authority":
        """The authority in a folder, which is made if the folder has none.

        Raises:
            StorageError: its files cannot be read or written, or do not belong together.
        """
        try:
            if not (folder / CERTIFICATE).exists():
                return _create(folder, cluster)
            certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the certificate authority in {folder} cannot be used: {error}: restore "
                f"{CERTIFICATE} and {KEY}, or remove both, after which every node must join again",
                path=str(folder),
            ) from error
        is_own = key.public_key() == certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_own:
            raise StorageError(f"{folder / KEY} is not the key of {CERTIFICATE}: restore it")
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        """The authority's certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate (DER), 64 hexadecimal digits; part of a join token."""
        return hashlib.sha256(
            self._certificate.public_bytes(serialization.Encoding.DER)
        ).hexdigest()

    def sign(
        self, request: bytes, identity: Identity, hosts: Iterable[str] = (), life: timedelta = LIFE
    ) -> bytes:
        """A certificate (PEM) for the key of a signing request (PEM, see `make_request`), with
        this identity and these host names and addresses. What the request says of names does not
        count.

        Raises:
            InvalidRequestError: the request is malformed, or not signed by its own key.
        """
        try:
            asked = x509.load_pem_x509_csr(request)
        except ValueError as error:
            raise InvalidRequestError(f"the signing request is malformed: {error}") from error
        if not asked.is_signature_valid:
            raise InvalidRequestError("the signing request is not signed with its own key")
        now = datetime.now(UTC)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(f"{identity.role} {identity.name}"[:64]))
            .issuer_name(self._certificate.subject)
            .public_key(asked.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(min(now + life, self._certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(authority, critical=False)
            .add_extension(_alternative_names(identity, hosts), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def revoke(self, serials: Iterable[str], number: int) -> bytes:
        """The signed list (PEM) of revoked certificates, by their serial numbers in hexadecimal.
        `number` must increase from list to list."""
        now = datetime.now(UTC)
        listed = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now - CLOCK_SKEW)
            # Lists are replaced when they change, not at a time.
            .next_update(self._certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(number), critical=False)
        )
        for serial in sorted(serials):
            revoked = x509.RevokedCertificateBuilder().serial_number(int(serial, 16))
            listed = listed.add_revoked_certificate(revoked.revocation_date(now).build())
        return listed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def is_current(self, crl: x509.CertificateRevocationList, serials: Iterable[str]) -> bool:
        """Whether `revoke` would list the same certificates for as long."""
        return (
            crl.is_signature_valid(self._key.public_key())
            and crl.next_update_utc == self._certificate.not_valid_after_utc
            and {each.serial_number for each in crl} == {int(serial, 16) for serial in serials}
        )

    def issue(
        self, folder: Path, identity: Identity, hosts: Iterable[str] = (), life: timedelta = LIFE
    ) -> TlsFiles:
        """Make a key, and a certificate for it, in a folder: `ca.pem`, `ROLE-NAME.pem` and `.key`.

        Raises:
            StorageError: the folder cannot be written.
        """
        key, request = make_request()
        name = quote(identity.name, safe="")
        stem = f"{identity.role}-{name}" if name else str(identity.role)
        files = TlsFiles(
            ca=str(folder / CERTIFICATE),
            certificate=str(folder / f"{stem}.pem"),
            key=str(folder / f"{stem}.key"),
        )
        make_private_folder(folder)
        certificate = self.sign(request, identity, hosts, life)
        for path, text in (
            (files.ca, self.pem),
            (files.key, key),
            (files.certificate, certificate),
        ):
            write_private(Path(path), text.decode())
        return files


def make_request() -> tuple[bytes, bytes]:
    """A new private key and a signing request for it (both PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_name("plexrl"))
    return _key_pem(key), request.sign(key, hashes.SHA256()).public_bytes(
        serialization.Encoding.PEM
    )


def _create(folder: Path, cluster: str) -> Authority:
    make_private_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(f"{cluster} authority"))
        .issuer_name(_name(f"{cluster} authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_authority_usage(), critical=True)
        .add_extension(subject, critical=False)
        .sign(key, hashes.SHA256())
    )
    made = Authority(certificate, key)
    # The certificate last: it says that the authority is complete.
    write_private(folder / KEY, _key_pem(key).decode())
    write_private(folder / CERTIFICATE, made.pem.decode())
    return made


def _authority_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(identity: Identity, hosts: Iterable[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )

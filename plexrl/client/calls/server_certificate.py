"""Checks of the certificate that an API over HTTPS shows."""

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.errors import AuthenticationError, InvalidRequestError

if TYPE_CHECKING:
    import os

HINT = (
    "give the file with the certificate of the cluster's authority, plexrl.connect(ca='ca.pem'), "
    "--ca-file or PLEXRL_CA_FILE; `plexrl up` says on the head where it is"
)


def trusted_by(ca: "str | os.PathLike[str] | None", urls: Iterable[str]) -> ssl.SSLContext | bool:
    """The context by which `httpx` verifies servers: the authorities in the file `ca` and no
    others, or without a file the public ones. If none of the URLs has a server with a certificate,
    none is loaded: the public ones take 30 ms.

    Raises:
        InvalidRequestError: the file cannot be used.
    """
    if not ca:
        return any(url.lower().startswith("https:") for url in urls)
    try:
        return ssl.create_default_context(cafile=str(Path(ca).expanduser()))
    except OSError as error:
        raise InvalidRequestError(
            f"the CA file {str(ca)!r} cannot be used: {error}: give a PEM file with the "
            "certificate of the cluster's authority"
        ) from error


def refused_certificate(
    url: str, ca: "str | os.PathLike[str] | None", error: BaseException
) -> AuthenticationError | None:
    """The error for a server whose certificate was refused; None: `error` has another cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if cause.verify_code in HOST_MISMATCH:
        mend = "use a host name or address that the certificate names, or have it made anew"
    elif cause.verify_code == EXPIRED:
        mend = "it has expired, or this machine's clock is wrong: have the certificate renewed"
    elif ca:
        mend = f"it is not of an authority in {str(ca)!r}: {HINT}"
    else:
        mend = HINT
    return AuthenticationError(
        f"the certificate of {url} is not accepted ({cause.verify_message}): {mend}"
    )


EXPIRED = 10
"""OpenSSL's `X509_V_ERR_CERT_HAS_EXPIRED`."""
HOST_MISMATCH = (62, 64)
"""OpenSSL's `X509_V_ERR_HOSTNAME_MISMATCH` and `X509_V_ERR_IP_ADDRESS_MISMATCH`."""

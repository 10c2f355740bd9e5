"""Keeps a pod's certificate: asks the issuer for the first one, and for the next at half its life.

The private key is made once for a pod and stays in its memory, so a new certificate always fits the
key that other processes have already read.
"""

import json
import logging
import ssl
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from plexrl.cluster.join.authority import make_request
from plexrl.cluster.kubernetes.certificates.issuer import PATH
from plexrl.errors import UnavailableError
from plexrl.process.folders.operator_key import write_private

LOG = logging.getLogger(__name__)

CA = "ca.pem"
CERTIFICATE = "certificate.pem"
KEY = "key.pem"
TOKEN = "token"
TIMEOUT_S = 30.0
RETRY_S = 2.0
RETRY_S_MAX = 60.0
RETRY_FIRST_S_MAX = 4.0
"""While the pod waits for its first certificate."""


class Renewal:
    """A pod's certificate in a folder."""

    def __init__(self, issuer: str, identity: Path, folder: Path) -> None:
        """`identity` is a folder with the issuer's authority, `ca.pem`, and the pod's `token`."""
        self._issuer, self._identity, self._folder = issuer, identity, folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, request = make_request()
        self._request = request.decode()
        write_private(folder / KEY, key.decode())

    def renew(self) -> float:
        """Get a certificate; returns in how many seconds to get the next one.

        Raises:
            UnavailableError: the issuer cannot be reached, or refuses.
        """
        from cryptography import x509

        try:
            # Both files are replaced while the pod runs.
            context = ssl.create_default_context(cafile=str(self._identity / CA))
            token = (self._identity / TOKEN).read_text().strip()
            asked = urllib.request.Request(
                self._issuer.rstrip("/") + PATH,
                data=json.dumps({"request": self._request}).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            # The issuer is a part of this cluster: no proxy of the environment leads to it.
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
            )
            with opener.open(asked, timeout=TIMEOUT_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read(4096).decode(errors="replace")
            raise UnavailableError(f"the issuer refused ({error.code}): {text}") from error
        except (OSError, ValueError) as error:
            raise UnavailableError(f"no certificate from {self._issuer}: {error}") from error
        # The certificate last: it says that the others are there.
        write_private(self._folder / CA, found["ca"])
        write_private(self._folder / CERTIFICATE, found["certificate"])
        own = x509.load_pem_x509_certificate(found["certificate"].encode())
        left = own.not_valid_after_utc - datetime.now(UTC)
        return max(RETRY_S, left.total_seconds() / 2)

    def keep(self, stop: threading.Event) -> None:
        """Renew until `stop`; what fails is tried again, less and less often."""
        retry_s, retry_s_max = RETRY_S, RETRY_FIRST_S_MAX
        while not stop.is_set():
            try:
                wait_s = self.renew()
                retry_s, retry_s_max = RETRY_S, RETRY_S_MAX
                LOG.info("got a certificate; the next one in %.0f s", wait_s)
            except UnavailableError as error:
                LOG.warning("%s; trying again in %.0f s", error, retry_s)
                wait_s, retry_s = retry_s, min(2 * retry_s, retry_s_max)
            stop.wait(wait_s)

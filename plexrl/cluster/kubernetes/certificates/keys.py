"""Makes the secrets of a cluster once: the authority, the operator's key, the ticket key.

What exists is never replaced: with another authority no pod would trust another, and with another
ticket key no StateManager would accept another node's worker.
"""

import base64
import logging
import secrets
import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.cluster.join.authority import CERTIFICATE, KEY, Authority
from plexrl.cluster.kubernetes.api import TIMEOUT_S, has_status
from plexrl.errors import InvalidRequestError
from plexrl.process.folders.operator_key import new_api_key
from plexrl.statemanager.protocol.tickets import KEY_BYTES

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)

OPERATOR_KEY = "operator-key"
TICKET_KEY = "ticket-key"
TLS_CERTIFICATE = "tls.crt"
TLS_KEY = "tls.key"


def make_keys(
    api: "ApiClient", namespace: str, *, keys: str, authority: str, certificate: str
) -> None:
    """Make the Secrets `keys` and `authority` if they are missing, and the ConfigMap `certificate`
    with the authority's certificate.

    Raises:
        InvalidRequestError: a Secret exists and lacks an entry.
        ApiException: the API server refuses.
    """
    from kubernetes.client import CoreV1Api

    core = CoreV1Api(api)
    _secret(
        core,
        namespace,
        keys,
        "Opaque",
        {OPERATOR_KEY: new_api_key().encode(), TICKET_KEY: secrets.token_bytes(KEY_BYTES)},
    )
    with tempfile.TemporaryDirectory() as scratch:
        # A pod's /tmp has no sticky bit, so the folder must be below one that is ours.
        folder = Path(scratch, "authority")
        made = Authority.open(folder, namespace)
        entries = {TLS_CERTIFICATE: made.pem, TLS_KEY: (folder / KEY).read_bytes()}
    found = _secret(core, namespace, authority, "kubernetes.io/tls", entries)
    _config_map(core, namespace, certificate, found[TLS_CERTIFICATE].decode())


def _secret(
    core: Any, namespace: str, name: str, kind: str, entries: dict[str, bytes]
) -> dict[str, bytes]:
    """The entries of the Secret, which is made of `entries` if it is missing."""
    from kubernetes.client import ApiException, V1ObjectMeta, V1Secret

    body = V1Secret(
        metadata=V1ObjectMeta(name=name),
        type=kind,
        data={key: base64.b64encode(value).decode() for key, value in entries.items()},
    )
    try:
        core.create_namespaced_secret(namespace, body, _request_timeout=TIMEOUT_S)
    except ApiException as error:
        if not has_status(error, HTTPStatus.CONFLICT):
            raise
    else:
        LOG.info("made the Secret %s", name)
        return entries
    secret = core.read_namespaced_secret(name, namespace, _request_timeout=TIMEOUT_S)
    found = {key: base64.b64decode(value) for key, value in (secret.data or {}).items()}
    missing = sorted(entries.keys() - found.keys())
    if missing:
        raise InvalidRequestError(
            f"the Secret {name} of namespace {namespace} has no {', '.join(missing)}: add it, or "
            "name another Secret"
        )
    LOG.info("the Secret %s exists and stays as it is", name)
    return found


def _config_map(core: Any, namespace: str, name: str, certificate: str) -> None:
    from kubernetes.client import ApiException, V1ConfigMap, V1ObjectMeta

    body = V1ConfigMap(metadata=V1ObjectMeta(name=name), data={CERTIFICATE: certificate})
    try:
        core.create_namespaced_config_map(namespace, body, _request_timeout=TIMEOUT_S)
    except ApiException as error:
        if not has_status(error, HTTPStatus.CONFLICT):
            raise
        core.patch_namespaced_config_map(
            name, namespace, {"data": body.data}, _request_timeout=TIMEOUT_S
        )

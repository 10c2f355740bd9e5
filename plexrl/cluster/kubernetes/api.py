"""Access to the Kubernetes API with the official client."""

import os
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from plexrl.errors import UnavailableError
from plexrl.proxies import proxy_for

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

TIMEOUT_S = 30.0
"""Time limit of one request, as `_request_timeout`; watches have their own."""
KubeObject = dict[str, Any]
"""A Kubernetes object, or a part of one, as the API's JSON has it: the types are in its OpenAPI
document, and the API server checks them."""


def connect() -> "ApiClient":
    """A client of the cluster that this pod runs in, or else of the current kubeconfig.

    Raises:
        UnavailableError: there is neither.
    """
    from kubernetes import config
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config import ConfigException

    try:
        if "KUBECONFIG" in os.environ:
            config.load_kube_config()
        else:
            config.load_config()
    except ConfigException as error:
        raise UnavailableError(
            f"no Kubernetes API server is configured ({error}): run this in a pod with a "
            "ServiceAccount token, or set KUBECONFIG"
        ) from error
    found = Configuration.get_default_copy()
    is_pod = "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ
    if is_pod or proxy_for(found.host, os.environ) is None:
        # A pod reaches its own cluster's API directly, whatever proxy leads out of the cluster.
        found.proxy = None
    return ApiClient(found)


def has_status(error: Exception, *statuses: HTTPStatus) -> bool:
    """Whether an `ApiException` has one of these statuses."""
    return getattr(error, "status", None) in statuses

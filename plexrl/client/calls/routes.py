"""How a client's requests reach its cluster: by which router, directly or through a proxy, and
whether a router replied."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from plexrl.client.display.handle_repr import without_credentials
from plexrl.errors import InvalidRequestError
from plexrl.proxies import Proxy, proxy_for

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

TransportT = TypeVar("TransportT", bound="httpx.HTTPTransport | httpx.AsyncHTTPTransport")


class Endpoints:
    """The routers of one cluster. One is used until it fails, then the next."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        listed = urls.split(",") if isinstance(urls, str) else urls
        self.urls = tuple(url.strip().rstrip("/") for url in listed if url.strip())
        if not self.urls:
            raise InvalidRequestError("no URL of a router was given: give at least one")
        for url in self.urls:
            if not is_usable(url):
                # What stands before an @ may be a password.
                raise InvalidRequestError(
                    f"{url.rpartition('@')[2]!r} is not the URL of a router: it must begin with "
                    "http:// or https:// and name a host, such as http://localhost:8000"
                )
        self._at = 0

    def __str__(self) -> str:
        return ",".join(self.urls)

    @property
    def current(self) -> str:
        """URL of the router in use."""
        return self.urls[self._at]

    def failed(self, url: str) -> None:
        """Use the next router after `url` failed, unless another thread has switched already."""
        if url == self.current:
            self._at = (self._at + 1) % len(self.urls)


def is_usable(url: str) -> bool:
    """Whether requests can be sent to this URL."""
    if not url.startswith(("http://", "https://")):
        return False
    try:
        parts = urlsplit(url)
        # `port` raises `ValueError` if it is no number of a port.
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class Routes:
    """The proxies on the way to a cluster's routers."""

    def __init__(self, urls: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        found = {url: proxy_for(url, environment) for url in urls}
        self._proxies = {url: proxy for url, proxy in found.items() if proxy is not None}

    def mounts(self, make: "Callable[..., TransportT]") -> dict[str, TransportT]:
        """The transports with which `httpx` sends a router's requests where there is a proxy. Its
        own choice by the environment is not used.

        Raises:
            InvalidRequestError: the proxy cannot be used.
        """
        return {_origin(url): _through(url, proxy, make) for url, proxy in self._proxies.items()}

    def describe(self, url: str) -> str:
        """The words about a proxy in a message about a failed request; "" if there is no proxy."""
        proxy = self._proxies.get(url)
        if proxy is None:
            return ""
        host = urlsplit(url).hostname
        return f"; the request went through {proxy}: to reach {host} directly, add it to no_proxy"


def check_router(response: "httpx.Response") -> None:
    """Raises `InvalidRequestError` if a good response is not a JSON object, as a router's are."""
    if response.is_success and "json" in response.headers.get("content-type", ""):
        try:
            is_router = isinstance(response.json(), dict)
        except ValueError:
            is_router = False
        if is_router:
            return
    raise InvalidRequestError(no_router(response))


def no_router(response: "httpx.Response") -> str:
    """The message about a response that no router sends: without its body, which may be a page."""
    return (
        f"{_server(response)} answers, but is no PlexRL router: it sent {_content(response)}: "
        "check the URL and its port"
    )


def no_router_yet(response: "httpx.Response") -> str:
    """The message about a failure of a proxy, or of a router that starts or ends."""
    return (
        f"no router replied at {_server(response)}, which sent {_content(response)}: check that "
        "the cluster is up and the URL is right"
    )


def _server(response: "httpx.Response") -> str:
    url = response.request.url
    return f"{url.scheme}://{url.netloc.decode()}"


def _content(response: "httpx.Response") -> str:
    kind = response.headers.get("content-type", "").partition(";")[0] or "no content"
    target = response.headers.get("location")
    moved = f", which leads to {without_credentials(target)}" if target else ""
    return f"{kind} (HTTP {response.status_code} to {response.request.url.path}{moved})"


def _through(url: str, proxy: Proxy, make: "Callable[..., TransportT]") -> TransportT:
    try:
        return make(proxy=proxy.url)
    except (ImportError, ValueError) as error:
        why = "needs the package socksio" if isinstance(error, ImportError) else str(error)
        raise InvalidRequestError(
            f"{url} cannot be reached through {proxy} ({why}): add {urlsplit(url).hostname} to "
            f"no_proxy to reach it directly, or change {proxy.variable}"
        ) from error


def _origin(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")

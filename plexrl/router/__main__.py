"""The router process: `python -m plexrl.router --config FILE`."""

import asyncio
import logging
import socket

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    import uvicorn
    from fastapi import FastAPI

    from plexrl.process.children.startup import print_ready, run_part
    from plexrl.router.http.app import make_app
    from plexrl.router.server.config import RouterConfig
    from plexrl.router.server.connection_limits import (
        AcceptErrorHandler,
        RateLimitedWarnings,
        make_connections,
    )
    from plexrl.router.server.guarded_protocol import guarded
    from plexrl.router.server.https import guarded_https, server_certificate

DRAIN_S = 3
"""Time for running requests to end once the router stops. Long polls end at once. A request that is
still running after this time gets 503 with `Retry-After`."""


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; ready once the scheduler is connected."""
    connections = make_connections(config)
    certificate = None if config.https is None else server_certificate(config.https)
    protocol: type[asyncio.Protocol] = guarded(connections, config.header_timeout_s)
    if certificate is not None:
        protocol = guarded_https(connections, config.header_timeout_s, certificate)
    app, services = make_app(config)
    sock = _listen(config)
    logging.getLogger("uvicorn.error").addFilter(RateLimitedWarnings())
    asyncio.get_running_loop().set_exception_handler(AcceptErrorHandler(connections))
    server = uvicorn.Server(_server_config(app, protocol))
    # `_serve`, since `serve` would install uvicorn's own signal handlers.
    serving = asyncio.create_task(server._serve(sockets=[sock]))
    connected = asyncio.create_task(services.scheduler.connected.wait())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, connected, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if connected.done() and not serving.done():
        print_ready(host=config.host, port=sock.getsockname()[1])
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    services.shutdown.begin()
    server.should_exit = True
    connected.cancel()
    stopping.cancel()
    await serving


def _listen(config: RouterConfig) -> socket.socket:
    """The bound socket. asyncio disables Nagle's algorithm on accepted connections only if the
    protocol is given."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((config.host, config.port))
    return sock


def _server_config(app: FastAPI, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=75,
        http=protocol,
        ws="none",
    )


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    run_part("plexrl.router", __doc__, RouterConfig, serve)


if __name__ == "__main__":
    main()

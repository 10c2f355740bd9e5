"""The router process: `python -m plexrl.router --config FILE`."""

import argparse
import asyncio
import logging
import socket
from pathlib import Path

import uvicorn

from plexrl.process.startup import load_config, print_ready, run_until_signal
from plexrl.router.config import RouterConfig
from plexrl.router.http.app import make_app
from plexrl.router.http.server.descriptors import AcceptFailures, SparseWarnings, make_connections
from plexrl.router.http.server.guarded_protocol import guarded

DRAIN_S = 3
"""How long requests have to end once the router stops. Long polls end at once; what is left after
this time is cut off, and asked to be sent again."""


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args().config, RouterConfig)
    app, gateway = make_app(config)
    # With its protocol named, asyncio switches Nagle's delay off on accepted connections.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((config.host, config.port))

    connections = make_connections(config)
    logging.getLogger("uvicorn.error").addFilter(SparseWarnings())

    async def serve(stop: asyncio.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptFailures(connections))
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=DRAIN_S,
                timeout_keep_alive=75,
                http=guarded(connections, config.header_timeout_s),
                ws="none",
            )
        )
        # The process's own signals end it; uvicorn would take them over.
        serving = asyncio.create_task(server._serve(sockets=[sock]))
        connected = asyncio.create_task(gateway.scheduler.connected.wait())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, connected, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if connected.done() and not serving.done():
            print_ready(host=config.host, port=sock.getsockname()[1])
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        gateway.stopping.begin()
        server.should_exit = True
        connected.cancel()
        stopping.cancel()
        await serving

    run_until_signal(serve)


if __name__ == "__main__":
    main()

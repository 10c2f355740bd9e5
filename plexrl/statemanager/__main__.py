"""The StateManager process: `python -m plexrl.statemanager --config FILE`."""

import argparse
import asyncio
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.process.children.startup import (
        load_config,
        parse_config,
        print_ready,
        refusals_reported,
        remove_socket,
        run_until_signal,
    )
    from plexrl.process.memory.numa import node_of
    from plexrl.statemanager.config import StateManagerConfig
    from plexrl.statemanager.daemon.server import DaemonServer
    from plexrl.statemanager.daemon.service_manager import ServiceManager
    from plexrl.statemanager.daemon.tcp.server import TcpServer
    from plexrl.statemanager.device.backend import DeviceBackend, DeviceKind
    from plexrl.statemanager.device.choice import open_devices
    from plexrl.statemanager.observe.health import Health
    from plexrl.statemanager.observe.http import ObservationServer
    from plexrl.statemanager.store.store import Store
    from plexrl.statemanager.store.tiers.eviction.policy import TierName
    from plexrl.statemanager.transfer.transport.nixl import NixlLender

LOG = logging.getLogger(__name__)


SWITCH_INTERVAL_S = 0.0005
"""GIL switch interval: the longest that a request waits for a checkpoint writer's thread."""


def main() -> None:
    """Serve until a signal; then move complete versions to NVMe and delete the host tier."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with refusals_reported("plexrl.statemanager"):
        _run()


def _run() -> None:
    config, ends_with_parent = _read_arguments()
    # The store locks its tiers, so only one daemon gets past it and may replace the socket.
    devices = open_devices(
        config.device,
        bytes_max=config.device_bytes,
        prefault_bytes=config.device_prefault_bytes,
        idle_bytes_max=config.device_idle_bytes,
    )
    store = _open_store(config, devices)
    # All requests need the catalog's lock, which no move holds for long.
    run_until_signal(
        partial(serve, config, devices, store),
        ends_with_parent=ends_with_parent,
        works=lambda: store.used_bytes(TierName.NVME),
    )
    _leave_host_tier(config, store)


async def serve(
    config: StateManagerConfig, devices: DeviceBackend, store: Store, stop: asyncio.Event
) -> None:
    """Serve the store until `stop` is set."""
    remove_socket(config.listen)
    server = DaemonServer(config, store, devices)
    accepting = threading.Thread(target=server.serve, daemon=True)
    accepting.start()
    manager = ServiceManager(os.environ)
    with ExitStack() as servers:
        ports: dict[str, int | str] = {}
        if config.serve_tcp:
            lender = NixlLender() if config.serve_nixl else None
            remote = TcpServer(server.services, lender)
            servers.callback(remote.close)
            ports["serve_tcp"] = remote.address
        if config.metrics_port is not None:
            observation = _observation(config.metrics_port, server, accepting.is_alive)
            servers.callback(observation.close)
            ports["metrics_port"] = observation.port
        print_ready(listen=config.listen, **ports)
        manager.ready(accepting.is_alive)
        await stop.wait()
        manager.stopping()
        server.close()
    remove_socket(config.listen)


def _read_arguments() -> tuple[StateManagerConfig, bool]:
    """The configuration, and whether this process ends with its parent."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.statemanager", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path)
    source.add_argument("--config-json")
    parser.add_argument(
        "--end-with-parent",
        action="store_true",
        help="end this process when its parent ends",
    )
    options = parser.parse_args()
    if options.config_json is None:
        config = load_config(options.config, StateManagerConfig)
    else:
        config = parse_config(options.config_json, StateManagerConfig, "--config-json")
    return config, options.end_with_parent


def _open_store(config: StateManagerConfig, devices: DeviceBackend) -> Store:
    # Only a GPU needs pinned host memory, which allocates all of its pages at once.
    pins = config.device == DeviceKind.CUDA
    return Store(
        config,
        on_map=devices.register_host if pins else None,
        on_unmap=devices.unregister_host if pins else None,
        device_nodes=[node_of(address) for address in devices.pci_addresses()],
    )


def _leave_host_tier(config: StateManagerConfig, store: Store) -> None:
    """Move complete versions to NVMe, and delete the host tier unless some do not fit."""
    remaining = store.persist() if config.persist_on_exit else []
    if remaining:
        # They are complete, and a daemon that starts on this directory recovers them.
        names = ", ".join(remaining)
        LOG.error("NVMe is full; these versions remain in %s: %s", config.host_dir, names)
        return
    shutil.rmtree(config.host_dir, ignore_errors=True)


def _observation(
    port: int, server: DaemonServer, accepting: Callable[[], bool]
) -> ObservationServer:
    from plexrl.statemanager.daemon.metrics import DaemonCollector, exposition

    services = server.services
    health = Health(services.config, services.store, services.move_queue, accepting)
    collector = DaemonCollector(services, server.connections)
    return ObservationServer(port, health.reasons, lambda: exposition(collector))


if __name__ == "__main__":
    main()

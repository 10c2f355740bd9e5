"""Starts a worker process."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from plexrl.errors import StorageError, StorageFullError
from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.address import announced
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.store.disk_space import held_error
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Credentials
from plexrl.worker.agent.node_lease import end_with_lease
from plexrl.worker.config import WorkerConfig
from plexrl.worker.process.backend_factory import make_or_refuse
from plexrl.worker.process.leader_follower import make_worker
from plexrl.worker.process.process_group import join_process_group
from plexrl.worker.process.server import Server, WorkerName
from plexrl.worker.state.device import open_device
from plexrl.worker.state.state_mover import StateMover

LOG = logging.getLogger(__name__)

NICENESS = 10


def held_at_start(error: BaseException) -> StorageError | None:
    """The error to report to the node agent if a full or failing file system ended a worker before
    it was ready; None: another cause."""
    # A failed write inside torch raises RuntimeError; only its text names the cause.
    full_in_torch = isinstance(error, RuntimeError) and os.strerror(errno.ENOSPC) in str(error)
    if full_in_torch:
        return StorageFullError(f"a file system is full, so the worker cannot start: {error}")
    return held_error(error, "the worker cannot start")


def run_worker(config: WorkerConfig, ready: Callable[[], None]) -> None:
    """Run as a worker until the process is killed. Calls `ready` when requests can be served."""
    _redirect_output(config.log_path)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s rank {config.rank} "
        f"incarnation {config.incarnation}: %(message)s",
        force=True,
    )
    if config.lease_file:
        end_with_lease(Path(config.lease_file))
    # The control plane may share these cores: a computation must not delay its messages.
    os.nice(NICENESS)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    device = open_device(config.gpu_uuid)
    import torch

    torch.set_num_threads(config.threads)
    spec = deployment_spec_from_json(config.spec_json)
    if config.kind in ("train", "forward") or spec.layout.tp > 1:
        join_process_group(config, device.collectives)

    backend = make_or_refuse(spec, config.rank, config.world_size, config.checkpoint_url, device)
    client = StateManagerClient(
        config.statemanager,
        deployment=config.deployment,
        rank=config.rank,
        world_size=config.world_size,
        ticket=config.ticket,
        network=Network.of(config.tls, config.fabric),
        address=announced(config.statemanager, config.statemanager_address),
    )
    server = Server(
        parse_address(config.address),
        WorkerName(config.deployment, config.rank, config.incarnation),
        None if config.tls is None else Credentials(config.tls),
    )
    mover = StateMover(backend, client, config.group, device)
    worker = make_worker(backend, mover, server.requests)
    LOG.info("%s incarnation %d is ready", config.deployment, config.incarnation)
    ready()
    worker.run()


def _redirect_output(log_path: str) -> None:
    path = Path(log_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

"""Starts a worker process."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.errors import InvalidRequestError, StorageError, StorageFullError
from plexrl.latency.pace import parse_pace
from plexrl.model.deployment_spec import DeploymentSpec, deployment_spec_from_json
from plexrl.process.children.pulse import BEAT_S
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.address import announced
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.store.disk_space import held_error
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Credentials
from plexrl.wire.messages import WorkerName
from plexrl.worker.interface.config import WorkerConfig
from plexrl.worker.process.backend_factory import RefusedBackend
from plexrl.worker.process.node_lease import end_with_lease
from plexrl.worker.process.process_group import join_process_group
from plexrl.worker.process.server.server import ReceivedRequest, WorkerServer
from plexrl.worker.process.worker import Worker
from plexrl.worker.rollout.paced.backend import PacedRolloutBackend
from plexrl.worker.state.device import open_device
from plexrl.worker.state.state_mover import StateMover
from plexrl.worker.training.paced.backend import PacedTrainingBackend
from plexrl.worker.training.paced.mover import PacedMover
from plexrl.worker.training.paced.pacer import Pacer

if TYPE_CHECKING:
    import queue

    from plexrl.worker.interface.backend import Backend

LOG = logging.getLogger(__name__)

NICENESS = 10

MakeWorker = Callable[[StateManagerClient, "queue.Queue[ReceivedRequest]"], Worker]
"""Makes the worker of a rank whose backend exists."""


def held_at_start(error: BaseException) -> StorageError | None:
    """The error to report to the node agent if a full or failing file system ended a worker before
    it was ready; None: another cause."""
    # A failed write inside torch raises RuntimeError; only its text names the cause.
    full_in_torch = isinstance(error, RuntimeError) and os.strerror(errno.ENOSPC) in str(error)
    if full_in_torch:
        return StorageFullError(f"a file system is full, so the worker cannot start: {error}")
    return held_error(error, "the worker cannot start")


def run_worker(config: WorkerConfig, agent: Connection) -> None:
    """Run as a worker until the process is killed. Sends the agent `True` when requests can be
    served, and `None` each second as a sign of life."""
    threading.Thread(target=_beat, args=(agent,), name="pulse", daemon=True).start()
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
    spec = deployment_spec_from_json(config.spec_json)
    # Before the threads of client and server: they belong on the NUMA node of the device.
    make = paced_rank(config, spec) if spec.pace else _computing_rank(config, spec)
    client = StateManagerClient(
        config.statemanager,
        deployment=config.deployment,
        rank=config.rank,
        world_size=config.world_size,
        ticket=config.ticket,
        network=Network.of(config.tls, config.fabric),
        address=announced(config.statemanager, config.statemanager_address),
    )
    server = WorkerServer(
        parse_address(config.address),
        WorkerName(config.deployment, config.rank, config.incarnation),
        None if config.tls is None else Credentials(config.tls),
    )
    worker = make(client, server.requests)
    LOG.info("%s incarnation %d is ready", config.deployment, config.incarnation)
    agent.send(True)
    worker.run()


def _computing_rank(config: WorkerConfig, spec: DeploymentSpec) -> MakeWorker:
    """Open the device, meet the other ranks and make the backend."""
    device = open_device(config.gpu_uuid)
    import torch

    from plexrl.worker.process.backend_factory import make_or_refuse
    from plexrl.worker.process.leader_follower import make_worker

    torch.set_num_threads(config.threads)
    if config.kind in ("train", "forward") or spec.layout.tp > 1:
        join_process_group(config, device.collectives)
    backend = make_or_refuse(spec, config.rank, config.world_size, config.checkpoint_url, device)

    def make(client: StateManagerClient, requests: "queue.Queue[ReceivedRequest]") -> Worker:
        return make_worker(backend, StateMover(backend, client, config.group, device), requests)

    return make


def paced_rank(config: WorkerConfig, spec: DeploymentSpec) -> MakeWorker:
    """Make a backend that computes nothing. Nothing here may import torch: hundreds of such
    processes are to fit one machine."""
    backend: Backend
    try:
        pace = parse_pace(spec.pace)
        pacer = Pacer(pace.scale)
        if spec.kind == "train":
            backend = PacedTrainingBackend(spec, config.rank, pace, pacer)
        else:
            backend = PacedRolloutBackend(spec, config.rank, pace, pacer)
    except InvalidRequestError as error:
        # An earlier version accepted it.
        refused = RefusedBackend(error)
        return lambda client, requests: Worker(
            refused, StateMover(refused, client, config.group), requests
        )

    def make(client: StateManagerClient, requests: "queue.Queue[ReceivedRequest]") -> Worker:
        mover = PacedMover(backend, client, config.group, spec=spec, pace=pace, pacer=pacer)
        return Worker(backend, mover, requests)

    return make


def _beat(agent: Connection) -> None:
    """Tell the agent that this process runs, whatever its main thread computes: a long kernel or a
    large batch is not stuck, and each operation has a deadline of its own."""
    try:
        while True:
            # A message is far shorter than a pipe takes at once, so those of two threads never mix.
            agent.send(None)
            time.sleep(BEAT_S)
    except OSError:
        LOG.info("the agent reads no signs of life any more")


def _redirect_output(log_path: str) -> None:
    path = Path(log_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

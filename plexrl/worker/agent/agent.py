"""The node agent: starts, watches and stops the workers of its node on the scheduler's commands.

The agent makes no decisions. Workers outlive a lost connection to the scheduler; when the agent
connects again, it lists its workers. A scheduler on another machine grants a lease: when it has run
out, the agent ends all workers.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import time

from plexrl.errors import (
    PlexRLError,
    from_wire,
)
from plexrl.ids import DeploymentId, NodeId
from plexrl.process.children.pulse import BEAT_S, Pulse
from plexrl.process.children.startup import remove_socket
from plexrl.process.folders.folder_watch import Finding, FolderWatch
from plexrl.statemanager.protocol.address import announced
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.statemanager.store.disk_space import held_error
from plexrl.wire.links.address import UNIX, TlsAddress, UnixAddress, parse_address
from plexrl.wire.links.port_range import PortRange
from plexrl.wire.messages import LaunchWorkers, RankPlacement, StopWorkers
from plexrl.wire.messages.node_queries import Logs, LogView, ReadLog
from plexrl.wire.messages.reports import (
    HostMemoryReported,
    NodeConditionsReported,
    NodeJoined,
    StateReported,
    WorkerExited,
    WorkerReady,
    WorkerSeen,
)
from plexrl.wire.rpc import as_type, method_of, on_command, on_message
from plexrl.worker.agent.launcher import Launcher, WorkerProcess
from plexrl.worker.agent.node_conditions import (
    PART_STUCK,
    STATEMANAGER_UNHEALTHY,
    NodeConditions,
)
from plexrl.worker.agent.node_state import NodeState
from plexrl.worker.agent.scheduler_connection import SchedulerConnection
from plexrl.worker.agent.state_watch import Changes
from plexrl.worker.interface.config import AgentConfig, WorkerConfig, cores_of_gpu
from plexrl.worker.process.node_lease import CHECK_S, NodeLease, clock, machine
from plexrl.worker.process.process_group import LOOPBACK, interface_of

LOG = logging.getLogger(__name__)

LOG_LINES_MAX = 10_000
Key = tuple[str, int]
"""Deployment and rank."""


@dataclass(slots=True)
class _Running:
    config: WorkerConfig
    process: WorkerProcess
    pulse: Pulse
    is_ready: bool = False
    is_wanted: bool = True
    """False: the agent is stopping the worker, so its end is not reported."""
    is_killed: bool = False
    """It was killed because the node's lease had run out."""
    is_stuck: bool = False
    """It was killed because it gave no sign of life."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: PlexRLError | None = None
    """Why the worker could not start, if it reported that."""


class Agent:
    """The agent of one node."""

    def __init__(self, config: AgentConfig, launcher: Launcher) -> None:
        """Raises:
        InvalidRequestError: `host` is no address of this machine.
        """
        self._config = config
        self._launcher = launcher
        self._interface = interface_of(config.host) if config.host else LOOPBACK
        self._ports = PortRange(config.host, config.worker_ports)
        network = Network.of(config.tls, config.fabric)
        self._state = NodeState(
            config.node,
            config.statemanager,
            Path(config.ticket_key_file),
            network,
            Pulse(config.part_stuck_s),
        )
        self._conditions = NodeConditions()
        self._workers: dict[Key, _Running] = {}
        self._locks: dict[Key, asyncio.Lock] = {}
        self._rendezvous: dict[str, int] = {}
        """Newest incarnation of each deployment whose rendezvous file has been cleared."""
        self._lease = NodeLease(Path(config.run_dir) / "lease")
        self._joined: Callable[[], None] | None = None
        self._was_fenced = False
        """The workers were ended because the lease had run out, and the scheduler does not know."""
        self._scheduler = SchedulerConnection(
            config,
            {
                "launch": on_command(as_type(LaunchWorkers), self._launch),
                "stop": on_command(as_type(StopWorkers), self._stop),
                **self._state.handlers(),
                method_of(ReadLog): on_message(ReadLog, self._read_log),
            },
            describe_node=self._node_description,
            session=self._begin_session,
            unwanted=lambda deployment, rank: self._in_background(
                self._stop_worker((deployment, rank))
            ),
            lease=self._lease,
        )
        self._background: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event, joined: Callable[[], None] | None = None) -> None:
        """Serve until `stop`, then end all workers. Calls `joined` when the scheduler has accepted
        the node for the first time."""
        self._joined = joined
        self._remove_stale_sockets()
        self._warm_up()
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            stopping.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await asyncio.gather(*(self._stop_worker(key) for key in list(self._workers)))
            for task in list(self._background):
                task.cancel()
            await self._state.close()

    def _remove_stale_sockets(self) -> None:
        """Remove the sockets of workers that died with an earlier agent."""
        for stale in Path(self._config.run_dir).glob("w-*.sock"):
            stale.unlink()

    async def _serve(self) -> None:
        watching = [
            asyncio.create_task(self._end_workers_with_lease()),
            asyncio.create_task(self._end_stuck_workers()),
            asyncio.create_task(self._report_conditions()),
        ]
        try:
            await self._scheduler.run()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def _begin_session(self) -> Awaitable[None]:
        """The scheduler has accepted the node."""
        self._was_fenced = False
        if self._joined is not None:
            self._joined()
            self._joined = None
        self._conditions.report_again()
        return self._state.watch(self._report_changes)

    async def _end_workers_with_lease(self) -> None:
        """End all workers whenever the lease has run out: the scheduler may give their work to
        another node from then on."""
        while True:
            left_s = self._lease.left_s(clock())
            if left_s <= 0.0 and self._workers:
                if not self._was_fenced:
                    count = len(self._workers)
                    LOG.error("no scheduler extends the lease: all %d workers are ended", count)
                self._was_fenced = True
                for worker in self._workers.values():
                    worker.is_killed = True
                    worker.process.kill()
            await asyncio.sleep(min(left_s, CHECK_S) if left_s > 0.0 else CHECK_S)

    async def _end_stuck_workers(self) -> None:
        """Kill each worker that gives no sign of life."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(BEAT_S)
            now = loop.time()
            self._state.pulse.look(now)
            for (name, rank), worker in self._workers.items():
                worker.pulse.look(now)
                if worker.pulse.is_stuck and not worker.is_stuck:
                    worker.is_stuck = True
                    silent_s = worker.pulse.silent_s
                    LOG.error("%s rank %d was silent for %.0f s: killed", name, rank, silent_s)
                    worker.process.kill()

    async def _report_conditions(self) -> None:
        """Report what is wrong on this node, whenever it changes."""
        node = self._config.node
        folders = {Path(self._config.run_dir), Path(self._config.rendezvous_dir)}
        watch = FolderWatch(f"node {node}", sorted({*folders, Path(self._config.data_dir)}))
        while True:
            found = [*await watch.look(), *self._silent_parts()]
            changed = self._conditions.update(found, time())
            if changed is not None:
                self._scheduler.report(
                    NodeConditionsReported(node=NodeId(node), conditions=changed)
                )
            await asyncio.sleep(BEAT_S)

    def _silent_parts(self) -> list[Finding]:
        node, stuck_s = self._config.node, self._config.part_stuck_s
        replaced = f"it is replaced after {stuck_s:g} s without an answer"
        found = [
            (STATEMANAGER_UNHEALTHY, f"the StateManager of node {node}: {reason}")
            for reason in self._state.reasons
        ]
        if self._state.pulse.is_late:
            text = f"the StateManager of node {node} does not answer"
            found.append((PART_STUCK, f"{text}: {replaced}"))
        for (name, rank), worker in self._workers.items():
            if worker.pulse.is_late and worker.is_wanted:
                text = f"the worker of {name} rank {rank} on node {node} does not answer"
                found.append((PART_STUCK, f"{text}: {replaced}"))
        return found

    async def _node_description(self) -> NodeJoined:
        config = self._config
        # Awaited first: the rest is of one moment, and a node that was fenced lists no workers.
        states = await self._state.deployments()
        return NodeJoined(
            node=NodeId(config.node),
            gpus=config.gpus,
            gpu_memory_bytes=config.gpu_memory_bytes,
            gpu_kind=config.gpu_kind,
            host_memory_bytes=config.host_memory_bytes,
            nvme_bytes=config.nvme_bytes,
            node_type=config.node_type,
            speed=config.node_speed,
            block=config.block,
            host=config.host,
            ports=config.meeting_ports,
            fabric=config.fabric,
            statemanager=announced(config.statemanager, config.statemanager_address),
            workers=tuple(
                WorkerSeen(
                    deployment=DeploymentId(worker.config.deployment),
                    rank=worker.config.rank,
                    incarnation=worker.config.incarnation,
                    address=worker.config.address,
                )
                for worker in self._workers.values()
                if worker.is_ready and worker.is_wanted and not worker.is_killed
            ),
            states=tuple(map(DeploymentId, states)),
            was_fenced=self._was_fenced,
            machine=machine(),
        )

    # Commands of the scheduler

    async def _launch(self, command: LaunchWorkers) -> None:
        mine = [placed for placed in command.ranks if placed.node == self._config.node]
        configs = [self._worker_config(command, placed) for placed in mine]
        if len(mine) == len(command.ranks):
            self._clear_rendezvous(configs[0])
        await self._state.keep_ranks(command.deployment, [config.rank for config in configs])
        for config in configs:
            self._in_background(self._start_worker(config))

    def _clear_rendezvous(self, config: WorkerConfig) -> None:
        """Remove the rendezvous file before this agent's first launch of an incarnation. An earlier
        agent may have launched the same incarnation; its ranks died with it, and the new ranks must
        not wait for them."""
        if self._rendezvous.get(config.deployment, -1) < config.incarnation:
            self._rendezvous[config.deployment] = config.incarnation
            Path(config.rendezvous).unlink(missing_ok=True)

    async def _stop(self, command: StopWorkers) -> None:
        doomed = [
            key
            for key, worker in self._workers.items()
            if key[0] == command.deployment and worker.config.incarnation <= command.incarnation
        ]
        await asyncio.gather(*(self._stop_worker(key) for key in doomed))

    async def _read_log(self, asked: ReadLog) -> Logs:
        assert asked.deployment is not None, "the scheduler asks for each deployment"
        lines = max(1, min(asked.lines, LOG_LINES_MAX))
        found = []
        job, _, name = asked.deployment.rpartition("/")
        folder = Path(self._config.data_dir) / "logs" / self._config.node / job
        for path in sorted(folder.glob(f"{name}-*.log")):
            if not path.stem.removeprefix(f"{name}-").isdigit():
                continue
            text = path.read_text(errors="replace").splitlines()[-lines:]
            found.append(
                LogView(
                    deployment=asked.deployment,
                    node=self._config.node,
                    rank=int(path.stem.rpartition("-")[2]),
                    text="\n".join(text),
                )
            )
        return {"logs": found}

    # Workers

    def _worker_config(self, command: LaunchWorkers, placed: RankPlacement) -> WorkerConfig:
        config = self._config
        rank, gpu, world_size = placed.rank, placed.gpu, len(command.ranks)
        deployment, incarnation = command.deployment, command.incarnation
        job, _, name = deployment.rpartition("/")
        # Unix socket paths must be short, so they contain a hash of the deployment's id.
        short = hashlib.sha256(deployment.encode()).hexdigest()[:12]
        return WorkerConfig(
            deployment=deployment,
            job=job,
            kind=command.kind,
            incarnation=incarnation,
            rank=rank,
            world_size=world_size,
            group=command.group,
            address=f"{UNIX}{config.run_dir}/w-{short}-{rank}-{incarnation}.sock",
            rendezvous=f"{config.rendezvous_dir}/r-{short}-{incarnation}",
            statemanager=config.statemanager,
            statemanager_address=config.statemanager_address,
            ticket=self._state.ticket(
                Claims(
                    role=TicketRole.WORKER,
                    tenant=command.tenant,
                    job=job,
                    deployment=deployment,
                    rank=rank,
                    world_size=world_size,
                    group=command.group,
                    incarnation=incarnation,
                )
            ),
            checkpoint_url=config.checkpoint_url or f"{config.data_dir}/checkpoints",
            spec_json=command.spec_json,
            log_path=f"{config.data_dir}/logs/{config.node}/{job}/{name}-{rank}.log",
            threads=config.threads,
            gpu=gpu,
            gpu_uuid=config.gpu_uuids[gpu] if config.gpu_uuids else "",
            cores=cores_of_gpu(config.cores, gpu, config.gpus),
            lease_file=str(self._lease.file) if self._lease.is_needed else "",
            meeting_point=command.rendezvous,
            interface=self._interface if command.rendezvous else LOOPBACK,
            tls=config.tls if config.host else None,
            fabric=config.fabric,
        )

    def _warm_up(self) -> None:
        try:
            self._launcher.warm_up()
        except OSError as error:
            LOG.warning("not prepared for workers, the next launch tries again: %s", error)

    async def _start_worker(self, config: WorkerConfig) -> None:
        key = (config.deployment, config.rank)
        async with self._locks.setdefault(key, asyncio.Lock()):
            current = self._workers.get(key)
            if current is not None and current.config.incarnation >= config.incarnation:
                return
            if current is not None:
                await self._stop_worker(key)
            try:
                if self._config.host:
                    address = TlsAddress(self._config.host, self._ports.take(), self._config.node)
                    config = replace(config, address=str(address))
                # The fork server ends with the thread that started it, so that is the main thread.
                self._launcher.warm_up()
                process = await asyncio.to_thread(self._launcher.start, config)
            except (OSError, EOFError) as error:
                self._ports.give_back(config.address)
                reason = f"the worker could not be started: {error}"
                self._report_exit(config, reason, _code_of(error))
                return
            worker = _Running(config, process, Pulse(self._config.part_stuck_s))
            self._workers[key] = worker
        loop = asyncio.get_running_loop()
        loop.add_reader(process.ready.fileno(), self._heard, worker)
        loop.add_reader(process.sentinel, self._ended, key, worker)

    async def _stop_worker(self, key: Key) -> None:
        worker = self._workers.get(key)
        if worker is None:
            return
        worker.is_wanted = False
        await asyncio.to_thread(worker.process.stop)
        await worker.ended.wait()

    def _heard(self, worker: _Running) -> bool:
        """Read one message of a worker; returns whether there was one."""
        try:
            message = worker.process.ready.recv()
        except (EOFError, OSError):
            # The process is ending; `_ended` reports that.
            asyncio.get_running_loop().remove_reader(worker.process.ready.fileno())
            return False
        if message is None:
            worker.pulse.beat()
        elif message is not True:
            # The process ends after this error; `_ended` reports it.
            worker.error = from_wire(message)
        else:
            worker.is_ready = True
            config = worker.config
            ready = WorkerReady(
                deployment=DeploymentId(config.deployment),
                rank=config.rank,
                incarnation=config.incarnation,
                address=config.address,
            )
            self._scheduler.report(ready)
        return True

    def _ended(self, key: Key, worker: _Running) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.process.sentinel)
        loop.remove_reader(worker.process.ready.fileno())
        # Its last messages may have arrived together with its end.
        while worker.process.ready.poll() and self._heard(worker):
            pass
        worker.ended.set()
        if self._workers.get(key) is worker:
            del self._workers[key]
        address = parse_address(worker.config.address)
        if isinstance(address, UnixAddress):
            remove_socket(address.path)
        else:
            self._ports.give_back(worker.config.address)
        if not worker.is_wanted:
            return
        reason = worker.process.exit_reason()
        code = ""
        if worker.is_stuck:
            reason = f"it gave no sign of life for {self._config.part_stuck_s:g} s, and was killed"
        if worker.error is not None:
            reason, code = worker.error.message, worker.error.code
        LOG.warning("%s rank %d ended: %s", key[0], key[1], reason)
        self._report_exit(worker.config, reason, code)

    # Reports

    def _report_changes(self, changes: Changes) -> None:
        node = NodeId(self._config.node)
        if changes.states:
            self._scheduler.report(StateReported(node=node, states=changes.states))
        if changes.host_memory is not None:
            self._scheduler.report(HostMemoryReported(node=node, **asdict(changes.host_memory)))

    def _report_exit(self, config: WorkerConfig, reason: str, code: str) -> None:
        exited = WorkerExited(
            deployment=DeploymentId(config.deployment),
            rank=config.rank,
            incarnation=config.incarnation,
            reason=reason,
            code=code,
        )
        self._scheduler.report(exited)

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _code_of(error: Exception) -> str:
    """Code of the `PlexRLError` for a failed start; empty: none."""
    held = held_error(error, "the start failed")
    return "" if held is None else held.code

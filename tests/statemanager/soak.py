"""A node and its neighbour under random moves and random kills, and what must hold throughout."""

import multiprocessing
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from safetensors.numpy import load_file

from plexrl.errors import PlexRLError
from plexrl.statemanager.checkpoint.folder import complete_checkpoints
from plexrl.statemanager.checkpoint.requests import WriteCheckpoint
from plexrl.statemanager.checkpoint.retention import RetentionPolicy
from plexrl.statemanager.client import StateManagerClient
from plexrl.statemanager.fault_points import POINTS
from plexrl.statemanager.migration import migrate
from plexrl.statemanager.residency import TierName
from plexrl.statemanager.store import Store
from plexrl.statemanager.tickets import Role, job_of
from tests.statemanager.conftest import DEADLINE_S, Daemon, wait_until
from tests.statemanager.soak_model import Shelf
from tests.statemanager.soak_worker import (
    PARAMETER_BYTES,
    TIMEOUT_S,
    Command,
    Identity,
    Outcome,
    version,
    work,
)

MOMENT_S_MAX = 0.08
"""Kills come so long after the moves of a round begin, at the latest."""
POLL_S = 0.01
ANSWER_S = 120.0


class Node:
    """A daemon that is started again whenever it dies, sometimes with a fault point."""

    def __init__(self, daemon: Daemon, chance: random.Random, counts: Counter[str]) -> None:
        self.daemon = daemon
        self.path = daemon.config.listen
        self._chance = chance
        self._counts = counts
        self._plain = daemon.config
        self._arming = threading.Event()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """What was found wrong with what a dead one left."""
        self._watch = threading.Thread(target=self._keep_up)
        self._watch.start()

    def kill(self) -> None:
        """As a crash would, whatever it does."""
        with self._lock:
            process = self.daemon.process
            if process is not None:
                process.kill()

    def arm(self) -> None:
        """Let it die at some fault point, from its next start on: this one ends now."""
        self._arming.set()
        self.kill()

    def close(self) -> None:
        """Start it no more; it runs, and has no fault point."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._watch.join()
        # It ended with the thread that started it.
        self.daemon.kill()
        self.daemon.config = self._plain
        self.daemon.start()

    def _keep_up(self) -> None:
        try:
            while not self._ending.wait(POLL_S):
                if not self.daemon.is_alive():
                    self._restart()
        except BaseException as error:
            self.failure = error
            raise

    def _bury(self) -> None:
        """Clear a dead daemon away, which was killed and did not fail by itself."""
        process = self.daemon.process
        assert process is not None
        _, log = process.communicate(timeout=DEADLINE_S)
        self.daemon.process = None
        assert process.returncode == -signal.SIGKILL, (process.returncode, log)
        assert "Traceback" not in log, log
        self._counts["daemon"] += 1

    def _restart(self) -> None:
        with self._lock:
            self._bury()
            self.daemon.config = self._plain
            if self._chance.random() < 0.3:
                # Opened by itself, it asserts that every page and file has an owner, and one only.
                with closing(Store(self._plain)) as store:
                    store.check()
            if self._arming.is_set():
                self._arming.clear()
                point = f"{self._chance.choice(sorted(POINTS))}:{self._chance.randint(1, 3)}"
                self._counts[f"armed {point.partition(':')[0]}"] += 1
                self.daemon.config = replace(self._plain, fault_points=(point,))
            try:
                self.daemon.start()
            except AssertionError:
                # It got to its fault point before it served.
                assert self.daemon.config is not self._plain
                self._bury()
                self.daemon.config = self._plain
                self.daemon.start()


class Player:
    """A rank: its worker process, which may be killed, and what must be stored of it."""

    def __init__(self, soak: "Soak", node: Node, deployment: str, tenant: str, ranks: str) -> None:
        self._soak = soak
        self.node = node
        self.deployment, self.tenant = deployment, tenant
        rank, _, world_size = ranks.partition("/")
        self.rank, self._world_size = int(rank), int(world_size)
        self._incarnation = 0
        self.state, self.published = Shelf(), Shelf()
        self._process: ForkServerProcess | None = None
        self._pipe: Connection | None = None
        self.start()

    def start(self) -> None:
        """Have a new launch of the worker registered, where its node is now."""
        while (outcome := self._launch()) is None:
            self._bury()
        assert outcome == Outcome(), outcome

    def _launch(self) -> Outcome | None:
        self._incarnation += 1
        ticket = self.node.daemon.ticket(
            role=Role.WORKER,
            tenant=self.tenant,
            job=job_of(self.deployment),
            deployment=self.deployment,
            rank=self.rank,
            world_size=self._world_size,
            incarnation=self._incarnation,
        )
        identity = Identity(
            path=self.node.path,
            deployment=self.deployment,
            rank=self.rank,
            world_size=self._world_size,
            ticket=ticket,
        )
        self._pipe, theirs = self._soak.context.Pipe()
        self._process = self._soak.context.Process(target=work, args=(theirs, identity))
        self._process.start()
        theirs.close()
        return self._answer()

    def _bury(self) -> None:
        """Clear a worker away that was killed."""
        assert self._process is not None
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL, self._process.exitcode
        self._soak.counts["worker"] += 1
        self._clear()

    def kill(self) -> None:
        """As a crash would, whatever it does."""
        assert self._process is not None
        # One that is being replaced has ended already.
        with suppress(ValueError):
            self._process.kill()

    def stop(self) -> None:
        """End the worker as one that has done its work, if nothing kills it first."""
        assert self._pipe is not None
        assert self._process is not None
        with suppress(BrokenPipeError):
            self._pipe.send(Command(what="close"))
        self._process.join(ANSWER_S)
        if self._process.exitcode == 0:
            self._clear()
        else:
            self._bury()

    def do(self, command: Command) -> Outcome | None:
        """What came of a command; None: the worker was killed, and another has taken its place."""
        assert self._pipe is not None
        try:
            self._pipe.send(command)
            outcome = self._answer()
        except BrokenPipeError:
            outcome = None
        if outcome is None:
            self._bury()
            self.start()
        return outcome

    def _answer(self) -> Outcome | None:
        assert self._pipe is not None
        assert self._process is not None
        ready = wait([self._pipe, self._process.sentinel], ANSWER_S)
        assert ready, f"{self.deployment} got no answer"
        try:
            found: Outcome = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return found

    def _clear(self) -> None:
        assert self._pipe is not None
        assert self._process is not None
        self._pipe.close()
        self._process.close()

    def save(self, seq: int, what: str) -> None:
        """Have a version stored, beside the newest."""
        shelf, keep_seq = self.state, self.state.newest
        shelf.begins(seq, {keep_seq})
        outcome = self.do(Command(what=what, seq=seq, keep_seq=keep_seq))
        if outcome is not None:
            assert outcome.error in ("", "state_tier_full"), outcome
            if not outcome.error:
                shelf.ends(seq, {keep_seq})

    def publish(self, seq: int) -> None:
        """Have a version published, beside the newest."""
        shelf = self.published
        keep = {max(shelf.may, default=0)}
        maybe = set(shelf.may)
        shelf.begins(seq, keep)
        outcome = self.do(Command(what="publish", seq=seq))
        if outcome is not None:
            assert outcome.error in ("", "state_tier_full"), outcome
            if not outcome.error:
                shelf.ends(seq, keep, maybe)

    def load(self, seq: int) -> bool | None:
        """Whether a version is there, which then is exactly what was saved; None: not known."""
        outcome = self.do(Command(what="load", seq=seq))
        if outcome is None:
            return None
        assert outcome.error in ("", "state_lost"), outcome
        assert outcome.exact, f"{self.deployment} rank {self.rank}: {seq} is a mix"
        return not outcome.error

    def check(self) -> None:
        """Load every version that may be there."""
        there = set()
        for seq in sorted(self.state.may):
            found = self.load(seq)
            while found is None:
                found = self.load(seq)
            if found:
                there.add(seq)
        self.state.found(there)


class Soak:
    """Two nodes, three tenants, five workers."""

    def __init__(self, here: Daemon, there: Daemon, checkpoints: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.statemanager.soak_worker"])
        self._checkpoints = checkpoints
        self._nodes = [
            Node(daemon, random.Random(self.chance.random()), self.counts)
            for daemon in (here, there)
        ]
        here_node, there_node = self._nodes
        self._actors = [
            Player(self, here_node, "red/actor", "red", f"{rank}/2") for rank in range(2)
        ]
        self._blue = Player(self, here_node, "blue/actor", "blue", "0/1")
        self._green = Player(self, here_node, "green/actor", "", "0/1")
        self._rollout = Player(self, there_node, "red/rollout", "red", "0/1")
        self._savers = [*self._actors, self._blue, self._green]
        self._players = [*self._savers, self._rollout]
        self._seq = 0

    def run(self, kills: int) -> None:
        """Play rounds until so many processes were killed."""
        while self.kills < kills:
            self._round()

    @property
    def kills(self) -> int:
        """Daemons and workers that ended by SIGKILL."""
        return self.counts["daemon"] + self.counts["worker"]

    def end(self) -> None:
        """Everything whole is there still; once it is released, nothing is left of it."""
        for node in self._nodes:
            node.close()
            assert node.failure is None, node.failure
        self._check()
        self._check_checkpoints()
        names = {player.deployment for player in self._players}
        for player in self._players:
            player.stop()
        for node in self._nodes:
            with closing(node.daemon.agent()) as agent:
                wait_until(lambda agent=agent: _is_quiet(agent))  # type: ignore[misc]
                for name in names:
                    agent.release(name)
                wait_until(lambda agent=agent: _is_empty(agent))  # type: ignore[misc]
            assert not node.daemon.host_files()
            assert not node.daemon.nvme_files()
            assert not node.daemon.nvme_objects()
        assert not [path for path in self._checkpoints.rglob("*") if path.suffix == ".part"]

    def close(self) -> None:
        """Leave no process behind."""
        for node in self._nodes:
            node.close()
        for player in self._players:
            if player._process is not None:
                # One that was stopped is closed already.
                with suppress(ValueError):
                    player._process.kill()
                    player._process.join()
                    player._clear()

    def _round(self) -> None:
        self._seq += 1
        chance = self.chance
        before = self.kills
        moves: list[Callable[[], None]] = []
        move = chance.choice(("snapshot", "offload", "publish", "load"))
        # Replicas do the same at once, or each its own.
        together = chance.random() < 0.7
        for player in self._actors:
            what = move if together else chance.choice(("snapshot", "offload", "publish", "load"))
            moves.append(lambda player=player, what=what: self._move(player, what))  # type: ignore[misc]
        moves.append(self._move_of_blue())
        moves.append(self._move_of_green())
        moves.append(self._pull())
        moves.append(chance.choice((self._checkpoint, self._prefetch)))
        victims: list[Callable[[], None]] = []
        for node in self._nodes:
            if chance.random() < 0.45:
                victims.append(chance.choice((node.kill, node.arm)))
        victims += [player.kill for player in self._players if chance.random() < 0.12]
        timers = [threading.Timer(chance.uniform(0, MOMENT_S_MAX), victim) for victim in victims]
        with ThreadPoolExecutor(len(moves)) as pool:
            futures = [pool.submit(one) for one in moves]
            for timer in timers:
                timer.start()
            _raise_first(futures)
        for timer in timers:
            timer.join()
        self.counts["rounds"] += 1
        for node in self._nodes:
            assert node.failure is None, node.failure
        if self.kills > before:
            self._check()

    def _move(self, player: Player, what: str) -> None:
        seq = self._seq
        self.counts[what] += 1
        match what:
            case "publish":
                player.publish(seq)
            case "load":
                if player.state.newest:
                    found = player.load(player.state.newest)
                    assert found in (None, True), "what is complete is lost"
            case _:
                player.save(seq, what)

    def _move_of_blue(self) -> Callable[[], None]:
        what = self.chance.choice(("snapshot", "offload", "publish", "load", "release"))

        def play() -> None:
            if what != "release":
                self._move(self._blue, what)
                return
            self.counts["release"] += 1
            self._blue.stop()
            for shelf in (self._blue.state, self._blue.published):
                shelf.clears()
            with closing(self._blue.node.daemon.agent(TIMEOUT_S)) as agent:
                agent.release("blue/actor")
            for shelf in (self._blue.state, self._blue.published):
                shelf.cleared()
            self._blue.start()

        # One that is stopped cannot be killed.
        return play

    def _move_of_green(self) -> Callable[[], None]:
        what = self.chance.choice(("snapshot", "offload", "migrate", "migrate"))

        def play() -> None:
            green = self._green
            if what != "migrate" or not green.state.newest:
                self._move(green, "offload" if what == "migrate" else what)
                return
            self.counts["migrate"] += 1
            seq = green.state.newest
            source = green.node
            target = next(node for node in self._nodes if node is not source)
            green.stop()
            ticket = source.daemon.ticket(role=Role.AGENT)
            while not self._migrated(source, target, seq, ticket):
                self.counts["migrate again"] += 1
            with closing(source.daemon.agent(TIMEOUT_S)) as agent:
                agent.release(green.deployment)
            green.state.must, green.state.may = {seq}, {seq}
            green.node = target
            green.start()

        return play

    def _migrated(self, source: Node, target: Node, seq: int, ticket: bytes) -> bool:
        try:
            migrate(
                [source.path],
                target.path,
                deployment=self._green.deployment,
                seq=seq,
                ticket=ticket,
                timeout_s=TIMEOUT_S,
            )
        except PlexRLError as error:
            # The source died, and what it has became what it will be again; or it took too long.
            assert error.code in ("corrupt_state", "unavailable", "connection_lost"), error
            return False
        return True

    def _pull(self) -> Callable[[], None]:
        shelves = [player.published for player in self._actors]
        known = sorted({seq for shelf in shelves for seq in shelf.may})
        if not known:
            return lambda: None
        seq = self.chance.choice(known[-3:])
        way = self.chance.choice(("shm", "tcp"))
        delta = self.chance.random() < 0.3
        return lambda: self._pulled(seq, way, delta=delta, strict=False)

    def _pulled(self, seq: int, way: str, *, delta: bool, strict: bool) -> None:
        here = self._nodes[0]
        command = Command(
            what="pull",
            seq=seq,
            source="red/actor",
            sources=(here.path if way == "shm" else here.daemon.tcp,),
            delta=delta,
        )
        self.counts[f"pull {way}"] += 1
        outcome = self._rollout.do(command)
        if outcome is None:
            return
        allowed = {"", "state_tier_full"} if strict else {
            *("", "state_tier_full", "state_lost", "unavailable", "connection_lost")
        }
        assert outcome.error in allowed, (seq, way, outcome)
        self.counts[f"pull {outcome.error or 'done'}"] += 1
        assert outcome.exact, f"published version {seq} came as a mix"

    def _checkpoint(self) -> None:
        self.counts["checkpoint"] += 1
        seq = max(player.state.newest for player in self._actors)
        request = WriteCheckpoint(
            deployment="red/actor",
            name=f"c{self._seq}",
            seq=seq,
            retention=RetentionPolicy(keep_last=3),
        )
        with closing(self._nodes[0].daemon.agent(TIMEOUT_S)) as agent:
            try:
                agent.request(request)
            except PlexRLError as error:
                assert error.code in ("state_lost", "overloaded"), error
                self.counts[f"checkpoint {error.code}"] += 1

    def _prefetch(self) -> None:
        self.counts["prefetch"] += 1
        player = self.chance.choice(self._savers)
        with closing(self._nodes[0].daemon.agent(TIMEOUT_S)) as agent:
            agent.prefetch(player.deployment, max(player.state.may, default=1))

    def _check(self) -> None:
        """All that must be there loads, bit by bit."""
        with ThreadPoolExecutor(len(self._savers)) as pool:
            _raise_first([pool.submit(player.check) for player in self._savers])
        newest = max(player.published.newest for player in self._actors)
        if newest:
            self._pulled(newest, self.chance.choice(("shm", "tcp")), delta=False, strict=True)

    def _check_checkpoints(self) -> None:
        """What is published as whole is whole."""
        for path, record in complete_checkpoints(self._checkpoints / "red"):
            self.counts["checkpoints read"] += 1
            [file] = path.glob("*.safetensors")
            weights = load_file(file)["w"].tobytes()
            expected = version("red/actor", record.step)[:PARAMETER_BYTES].tobytes()
            assert weights == expected, path


def _raise_first(futures: Sequence["Future[None]"]) -> None:
    for future in futures:
        future.result(timeout=ANSWER_S + DEADLINE_S)


def _is_quiet(agent: StateManagerClient) -> bool:
    usage = agent.usage()
    ended = all(one["state"] in ("durable", "failed", "cancelled") for one in usage["checkpoints"])
    return ended and not usage["moves"]


def _is_empty(agent: StateManagerClient) -> bool:
    usage = agent.usage()
    return not any(usage[f"{tier.value}_bytes"] for tier in TierName) and not usage["deployments"]


def leftovers(*daemons: Daemon) -> list[Path]:
    """What is still in the daemons' directories, beside what a node keeps for good."""
    found = [path for daemon in daemons for path in Path(daemon.config.host_dir).glob("**/*")]
    found += [path for daemon in daemons for path in Path(daemon.config.nvme_dir).glob("**/*")]
    return found



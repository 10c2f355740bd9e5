"""A node and its neighbour under random moves and random kills, and what must hold throughout."""

import multiprocessing
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from safetensors.numpy import load_file

from plexrl.errors import PlexRLError
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.checkpoint.places.directory import DirectoryRoot
from plexrl.statemanager.checkpoint.requests import WriteCheckpoint
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.migration import migrate
from plexrl.statemanager.protocol.tickets import TicketRole
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from tests.statemanager.conftest import DEADLINE_S, Daemon, wait_until
from tests.statemanager.soak_processes import ANSWER_S, Node, Player
from tests.statemanager.soak_worker import (
    PARAMETER_BYTES,
    TIMEOUT_S,
    Command,
    version,
)

MOMENT_S_MAX = 0.08
"""Kills come so long after the moves of a round begin, at the latest."""


class Soak:
    """Two nodes, three tenants, five workers."""

    def __init__(self, here: Daemon, there: Daemon, checkpoints: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._context = multiprocessing.get_context("forkserver")
        self._checkpoints = checkpoints
        self._nodes = [
            Node(daemon, random.Random(self.chance.random()), self.counts)
            for daemon in (here, there)
        ]
        here_node, there_node = self._nodes
        self._actors = [
            self._player(here_node, "red/actor", "red", rank=rank, world_size=2)
            for rank in range(2)
        ]
        self._blue = self._player(here_node, "blue/actor", "blue")
        self._green = self._player(here_node, "green/actor", "")
        self._rollout = self._player(there_node, "red/rollout", "red")
        self._savers = [*self._actors, self._blue, self._green]
        self._players = [*self._savers, self._rollout]
        self._seq = 0

    def _player(self, node: Node, deployment: str, tenant: str, **ranks: int) -> Player:
        return Player(
            self._context, self.counts, node, deployment=deployment, tenant=tenant, **ranks
        )

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
            player.close()

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
        victims = [
            chance.choice((node.kill, node.arm)) for node in self._nodes if chance.random() < 0.45
        ]
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
            ticket = source.daemon.ticket(role=TicketRole.AGENT)
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
            if error.code not in ("corrupt_state", "unavailable", "connection_lost"):
                raise
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
        allowed = (
            {"", "state_tier_full"}
            if strict
            else {*("", "state_tier_full", "state_lost", "unavailable", "connection_lost")}
        )
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
                if error.code not in ("state_lost", "overloaded"):
                    raise
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
        for place, record in DirectoryRoot(self._checkpoints).complete("red"):
            self.counts["checkpoints read"] += 1
            [file] = place.path.glob("*.safetensors")
            weights = load_file(file)["w"].tobytes()
            expected = version("red/actor", record.step)[:PARAMETER_BYTES].tobytes()
            assert weights == expected, place


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

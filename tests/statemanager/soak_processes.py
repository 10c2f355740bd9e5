"""What the soak kills: daemons that are started again, and workers that are replaced."""

import random
import signal
import threading
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from plexrl.statemanager.protocol.tickets import TicketRole, job_of
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.fault_points import POINTS
from tests.statemanager.conftest import DEADLINE_S, Daemon
from tests.statemanager.soak_model import Shelf
from tests.statemanager.soak_worker import TIMEOUT_S, Command, Identity, Outcome, work

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

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
        # Nothing was damaged here, so what is named is whole.
        assert "is incomplete and was removed" not in log, log
        assert "is damaged and was removed" not in log, log
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

    def __init__(
        self,
        context: "ForkServerContext",
        counts: Counter[str],
        node: Node,
        *,
        deployment: str,
        tenant: str,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._context = context
        self._counts = counts
        self.node = node
        self.deployment, self.tenant = deployment, tenant
        self.rank, self._world_size = rank, world_size
        self._incarnation = 0
        self.state, self.published = Shelf(), Shelf()
        self.story: list[str] = []
        """What happened to it, for whoever has to find out."""
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
            role=TicketRole.WORKER,
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
        self._pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, identity))
        process.start()
        # Known to whoever kills only now that there is something to kill.
        self._process = process
        theirs.close()
        return self._answer()

    def _bury(self) -> None:
        """Clear a worker away that was killed."""
        assert self._process is not None
        self._process.join()
        # 255: the fork server could not tell any more.
        assert self._process.exitcode in (-signal.SIGKILL, 255), self._process.exitcode
        self._counts["worker"] += 1
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

    def close(self) -> None:
        """Leave no process behind."""
        assert self._process is not None
        # One that was stopped is closed already.
        with suppress(ValueError):
            self._process.kill()
            self._process.join()
            self._clear()

    def do(self, command: Command) -> Outcome | None:
        """What came of a command; None: the worker was killed, and another has taken its place."""
        assert self._pipe is not None
        self.story.append(f"{command.what} {command.seq} keep {command.keep_seq}")
        try:
            self._pipe.send(command)
            outcome = self._answer()
        except BrokenPipeError:
            outcome = None
        self.story.append("killed" if outcome is None else outcome.error or "done")
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
        with closing(self.node.daemon.agent(TIMEOUT_S)) as agent:
            deployments = agent.usage()["deployments"]
        stored = deployments.get(self.deployment, {"versions": []})["versions"]
        there = {
            version["seq"]
            for version in stored
            if (version["rank"], version["kind"]) == (self.rank, "state")
        }
        self.story.append(f"found {sorted(there)} of {self.state}")
        assert self.state.must <= there <= self.state.may, self.told()
        for seq in sorted(self.state.may):
            found = self.load(seq)
            while found is None:
                found = self.load(seq)
            # What is not stored of this rank may be had from its replica, as exactly.
            assert found or seq not in there, self.told()
        self.state.found(there)

    def told(self) -> str:
        """What happened to it lately."""
        return f"{self.deployment} rank {self.rank}: {' | '.join(self.story[-12:])}"

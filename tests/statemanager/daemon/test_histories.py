"""Random histories of register, offload, load, evict, prefetch, crash and migrate over the
socket."""

from contextlib import closing

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plexrl.errors import ConflictError, PermissionDeniedError, StateLostError
from plexrl.statemanager.client.migration import migrate
from plexrl.statemanager.protocol.tickets import TicketRole, job_of
from tests.examples import examples
from tests.statemanager.conftest import DEADLINE_S, MIB, Daemon, StartDaemon, wait_until
from tests.statemanager.soak_model import Shelf
from tests.statemanager.soak_worker import STATE_BYTES, Command, Identity, Worker

CRASHES_MAX = 2
"""Crashes per history: each takes as long as the rest of the history."""
FILLER = "filler/actor"
DEPLOYMENTS = ["blue/actor", "green/actor", "red/actor"]
TENANTS = {"red/actor": "red", "blue/actor": "blue", "green/actor": "", FILLER: "filler"}


class DaemonHistory(RuleBasedStateMachine):
    """Compares the expected versions of each deployment with what the daemons report and load."""

    def __init__(self, daemons: list[Daemon]) -> None:
        super().__init__()
        self.daemons = daemons
        self.shelves = {name: Shelf() for name in DEPLOYMENTS}
        self.homes = dict.fromkeys(TENANTS, 0)
        self.workers: dict[str, Worker] = {}
        self.incarnation = dict.fromkeys(TENANTS, 0)
        self.seq = 0
        self.crashes = 0

    def worker(self, name: str) -> Worker:
        """A new launch of the deployment's worker, on its current node."""
        self.incarnation[name] += 1
        daemon = self.daemons[self.homes[name]]
        ticket = daemon.ticket(
            role=TicketRole.WORKER,
            tenant=TENANTS[name],
            job=job_of(name),
            deployment=name,
            incarnation=self.incarnation[name],
        )
        path = daemon.config.listen
        identity = Identity(path=path, deployment=name, rank=0, world_size=1, ticket=ticket)
        return Worker(identity)

    @initialize()
    def begin(self) -> None:
        for name in DEPLOYMENTS:
            self.workers[name] = self.worker(name)

    @rule(name=st.sampled_from(DEPLOYMENTS))
    def register(self, name: str) -> None:
        former, self.workers[name] = self.workers[name], self.worker(name)
        try:
            former.carry_out(Command(what="snapshot", seq=1 << 20))
        except (ConflictError, PermissionDeniedError):
            former.close()
        else:
            raise AssertionError("a worker that was replaced stored something")

    @rule(name=st.sampled_from(DEPLOYMENTS), what=st.sampled_from(["offload", "snapshot"]))
    def save(self, name: str, what: str) -> None:
        self.seq += 1
        shelf = self.shelves[name]
        keep_seq = shelf.newest
        command = Command(what=what, seq=self.seq, keep_seq=keep_seq)
        self.workers[name].carry_out(command)
        shelf.ends(self.seq, {keep_seq})

    @precondition(lambda self: self.seq)
    @rule(name=st.sampled_from(DEPLOYMENTS), back=st.integers(0, 4))
    def load(self, name: str, back: int) -> None:
        shelf = self.shelves[name]
        known = sorted(shelf.must, reverse=True)
        seq = known[back] if back < len(known) else max(1, self.seq - back)
        try:
            outcome = self.workers[name].carry_out(Command(what="load", seq=seq))
        except StateLostError:
            assert seq not in shelf.must, "a complete version is lost"
        else:
            assert outcome.exact, "parts of two versions were loaded"
            assert seq in shelf.may, "a dropped version was loaded"

    @rule(node=st.integers(0, 1))
    def evict(self, node: int) -> None:
        """Fill the host tier with another deployment's state, so that all others are evicted."""
        self.homes[FILLER] = node
        filler = self.worker(FILLER)
        for seq in (1, 2, 3):
            filler.carry_out(Command(what="snapshot", seq=seq, keep_seq=seq - 1))
        filler.close()
        with closing(self.daemons[node].agent()) as agent:
            agent.release(FILLER)

    @rule(name=st.sampled_from(DEPLOYMENTS))
    def prefetch(self, name: str) -> None:
        with closing(self.daemons[self.homes[name]].agent()) as agent:
            agent.prefetch(name, self.shelves[name].newest)

    @precondition(lambda self: self.crashes < CRASHES_MAX)
    @rule(node=st.integers(0, 1))
    def crash(self, node: int) -> None:
        self.crashes += 1
        self.daemons[node].kill()
        self.daemons[node].start()

    @rule(name=st.sampled_from(DEPLOYMENTS))
    def migrate(self, name: str) -> None:
        shelf = self.shelves[name]
        if not shelf.newest:
            return
        source = self.daemons[self.homes[name]]
        self.homes[name] = 1 - self.homes[name]
        target = self.daemons[self.homes[name]]
        self.workers[name].close()
        seq = shelf.newest
        migrate(
            [source.config.listen],
            target.config.listen,
            deployment=name,
            seq=seq,
            ticket=target.ticket(role=TicketRole.AGENT),
            timeout_s=DEADLINE_S,
        )
        with closing(source.agent()) as agent:
            agent.release(name)
        shelf.must, shelf.may = {seq}, {seq}
        self.workers[name] = self.worker(name)

    @invariant()
    def the_daemons_say_what_is_stored(self) -> None:
        for index, daemon in enumerate(self.daemons):
            with closing(daemon.agent()) as agent:
                found = agent.usage()["deployments"]
            for name, shelf in self.shelves.items():
                there = {one["seq"] for one in found.get(name, {"versions": []})["versions"]}
                assert there == (shelf.must if self.homes[name] == index else set())

    def teardown(self) -> None:
        for name, shelf in self.shelves.items():
            if name not in self.workers:
                continue
            for seq in sorted(shelf.must):
                assert self.workers[name].carry_out(Command(what="load", seq=seq)).exact
            self.workers[name].close()
        for daemon in self.daemons:
            with closing(daemon.agent()) as agent:
                for name in self.shelves:
                    agent.release(name)
                wait_until(lambda agent=agent: not agent.usage()["deployments"])  # type: ignore[misc]
                usage = agent.usage()
            assert (usage["host_bytes"], usage["nvme_bytes"]) == (0, 0)
            assert not daemon.nvme_objects()
            assert not daemon.host_files()


def test_any_history_keeps_complete_versions_exact(start_daemon: StartDaemon) -> None:
    # Neither host tier can hold all versions.
    tiers = {"host_bytes": int(3.5 * STATE_BYTES), "nvme_bytes": 64 * MIB}
    daemons = [start_daemon(**tiers, segment_bytes_max=STATE_BYTES) for _ in range(2)]

    class History(DaemonHistory):
        def __init__(self) -> None:
            super().__init__(daemons)

    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=examples(6),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

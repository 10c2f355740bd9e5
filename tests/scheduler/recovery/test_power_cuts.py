"""What is kept to compute a state again: enough for versions that are in host memory only, which a
power cut takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import StateLostError
from plexrl.ids import BlobRef
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import Command, DiscardBlobs, Run
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster

ACTOR = "a/actor"
BYTES = 100
"""Of each payload."""


class Machine(FakeCluster):
    """A machine that stores a version after each operation, and moves the earlier ones to NVMe."""

    def __init__(self, **changes: object) -> None:
        self.discarded: list[str] = []
        super().__init__(**{"snapshot_operations": 1, **changes})
        self.start_node(gpus=2)
        self.job("a")
        self.deploy("a/actor")
        self.settle()
        self.done: list[str] = []
        self.on_nvme: set[int] = set()

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, DiscardBlobs):
                self.discarded += command.blobs
        super().take(commands)

    def train(self) -> None:
        """One operation, carried out to its end."""
        name = f"a:{len(self.done)}"
        self.done.append(name)
        event = ev.OperationSubmitted(
            operation=name,
            deployment=ACTOR,
            kind=OperationKind.FORWARD_BACKWARD,
            params=None,
            payload=BlobRef(f"blob:{name}"),
            payload_bytes=BYTES,
        )
        self.send(event)
        self.settle()

    def fill_nvme(self) -> None:
        """All versions but the newest are copied to NVMe, and the node says so."""
        held = set(self.wpgs[ACTOR].versions)
        self.on_nvme = held & self.on_nvme | held - {max(held, default=0)}
        where = ev.StateResidency(
            deployment=ACTOR, host_bytes=1, nvme_bytes=0, on_nvme=tuple(sorted(self.on_nvme))
        )
        self.send(ev.StateReported(node="n", states=(where,)))

    def cut_power(self) -> None:
        """The node is there again, with what NVMe holds."""
        wpg = self.wpgs[ACTOR]
        wpg.versions = {seq: wpg.versions[seq] for seq in wpg.versions if seq in self.on_nvme}
        self.lose_node("n")
        self.join_node(node="n")

    def execute(self, run: Run, *, report: bool = True, trainer_step: int | None = None) -> None:
        is_load = run.kind is OperationKind.LOAD
        if not is_load or run.seq in {0, *self.wpgs[ACTOR].versions}:
            super().execute(run, report=report, trainer_step=trainer_step)
            return
        self.runs.remove(run)
        error = StateLostError("no file").to_wire()
        failed = ev.OperationFailed(
            operation=run.operation, token=run.token, error=error, state_intact=False
        )
        self.send(failed)


@given(
    bound=st.integers(4, 8),
    # Whether the earlier versions are on NVMe after an operation, and whether power is cut then.
    moments=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40),
)
def test_a_power_cut_loses_no_state_unless_nvme_is_behind_by_half_of_the_bound(
    bound: int, moments: list[tuple[bool, bool]]
) -> None:
    machine = Machine(rebuild_operations=bound)
    behind, since_cut = 0, 0
    for is_filled, is_cut in moments:
        machine.train()
        behind = 0 if is_filled or behind >= bound // 2 else behind + 1
        if not behind:
            machine.fill_nvme()
        since_cut += 1
        if is_cut and since_cut >= bound // 2:
            machine.cut_power()
            since_cut = 0
    machine.train()
    assert machine.wpgs[ACTOR].device == machine.done


@pytest.mark.parametrize(
    "bounds", [{"rebuild_operations": 8}, {"rebuild_payload_bytes_max": 8 * BYTES}]
)
def test_payloads_are_kept_up_to_the_bound_if_nvme_has_an_earlier_version(
    bounds: dict[str, int],
) -> None:
    machine, kept = Machine(**bounds), list[int]()
    for count in range(1, 41):
        machine.train()
        machine.fill_nvme()
        kept.append(count - len(machine.discarded))
    assert kept[:8] == list(range(1, 9))
    # The version of an operation is made when the next one is about to run.
    assert max(kept) == 9
    assert min(kept[8:]) >= 3


def test_payloads_are_kept_up_to_twice_the_bound_if_nvme_has_none() -> None:
    machine, kept = Machine(rebuild_operations=4), list[int]()
    for count in range(1, 41):
        machine.train()
        kept.append(count - len(machine.discarded))
    assert max(kept) == 9
    none = Machine(rebuild_operations=0)
    for count in range(1, 8):
        none.train()
        assert count - len(none.discarded) == 1
    none.send(ev.JobFinished(job="a", outcome="completed"))
    assert sorted(none.discarded) == [f"blob:{name}" for name in none.done]

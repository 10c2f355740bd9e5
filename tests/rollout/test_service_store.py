"""What a rollout service that is killed at any moment finds in its store."""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from plexrl.errors import CorruptStateError, InvalidRequestError, StorageError
from plexrl.rollout.coordinator.messages import (
    Generated,
    GroupAdded,
    GroupFiltered,
    ParametersPushed,
    PolicyChanged,
    RolloutEvent,
    Stopped,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.service.journal.state import RolloutState
from plexrl.rollout.service.journal.store import (
    STEPS_KEPT,
    Forgotten,
    GeneratedPart,
    JournalEntry,
    RolloutStore,
)
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.trajectories.record import (
    SampleGroupId,
    TrajectoryId,
    TrajectorySegment,
    trajectory_ids,
)
from plexrl.wire.operations import SamplingParams
from tests.rollout.fleet import Fleet
from tests.rollout.history import History

ORDER = RolloutOrder(
    job="job",
    name="rollout",
    source="actor",
    instances=("rollout-0", "rollout-1"),
    staleness=1,
    prompts=2,
    samples=2,
    sampling=SamplingParams(seed=3, stop_token_ids=(5,)),
)


def played(seed: int) -> History:
    history = History(Random(seed))
    for _ in range(60):
        history.act()
    history.finish()
    return history


def order_of(settings: CoordinatorSettings) -> RolloutOrder:
    """The settings of a history are of all kinds, and an order has few."""

    class Order(RolloutOrder):
        def settings(self) -> CoordinatorSettings:
            return settings

    fields = {name: getattr(ORDER, name) for name in ORDER.__dataclass_fields__}
    return Order(**fields)


@pytest.mark.parametrize("seed", range(8))
def test_a_restored_rollout_is_as_if_all_events_were_replayed(seed: int, tmp_path: Path) -> None:
    """Snapshots, crashes and commits of several events are at random places."""
    history = played(seed)
    order, random = order_of(history.fleet.settings), Random(seed)
    store = RolloutStore(tmp_path / "rollout.sqlite")
    state, everything = RolloutState.new(order), RolloutState.new(order)
    queue: list[JournalEntry] = []
    for seq, (event, commands) in enumerate(history.fleet.log, 1):
        assert state.core.handle(event) == commands
        orders = state.note(seq, event, commands)
        assert everything.core.handle(event) == commands
        assert everything.note(seq, event, commands) == orders
        is_changed = isinstance(event, PolicyChanged)
        if is_changed:
            order = order_of(state.core.settings)
        snapshot = state.plain() if is_changed or random.random() < 0.1 else None
        queue.append(JournalEntry(seq=seq, event=event, commands=commands, snapshot=snapshot))
        if random.random() < 0.3:
            store.write(queue)
            queue.clear()
        if not queue and random.random() < 0.1:
            store.close()
            store = RolloutStore(tmp_path / "rollout.sqlite")
            state = RolloutState.stored(order, store)
            assert state.seq == seq
            assert state.plain() == everything.plain()
        for name, work in state.instances.work.items():
            assert set(work.held) == {each.id for each in state.core.trajectories.on_instance(name)}
            assert set(work.held.values()) == set(work.routes)
            assert work.begun <= work.routed
            for number, routed in work.routes.items():
                assert work.unended[number] == sum(work.held.get(t) == number for t in routed)
    store.close()


@pytest.mark.parametrize("seed", range(6))
def test_an_event_that_is_not_stored_changes_no_state(seed: int, tmp_path: Path) -> None:
    history = played(seed)
    store = RolloutStore(tmp_path / "rollout.sqlite")
    state = RolloutState.new(order_of(history.fleet.settings))
    plain = msgspec.json.encode(state.plain())
    for event, _ in history.fleet.log:
        taken = state.take(event, store)
        before, plain = plain, msgspec.json.encode(state.plain())
        assert taken is not None or plain == before
    store.close()


def write_tail(seed: int, store: RolloutStore) -> CoordinatorSettings:
    """Stores the events of a history, whose policy stays the same, without a state."""
    history = played(seed)
    store.begin(ORDER)
    state = RolloutState.new(order_of(history.fleet.settings))
    entries = []
    for event, _ in history.fleet.log:
        if isinstance(event, PolicyChanged):
            break
        taken = state.take(event, store)
        if taken is not None:
            entries.append(replace(taken[0], snapshot=None))
    store.write(entries)
    return history.fleet.settings


def test_events_are_not_replayed_to_other_commands(tmp_path: Path) -> None:
    """Another way to route is what another version may have."""
    refused = 0
    for seed in range(8):
        store = RolloutStore(tmp_path / f"{seed}.sqlite")
        settings = write_tail(seed, store)
        other = replace(
            settings,
            routing="count" if settings.routing != "count" else "throughput",
            synchronisation="greedy",
            migration="none",
        )
        stopped = RolloutState.stored(order_of(settings), store)
        try:
            state = RolloutState.stored(order_of(other), store)
        except CorruptStateError as error:
            refused += "stop it with SIGTERM" in str(error)
        else:
            assert state.instances.work == stopped.instances.work
        # Without events there is nothing that may be decided in another way.
        store.write_snapshot(stopped.seq, stopped.plain())
        assert RolloutState.stored(order_of(other), store).plain() == stopped.plain()
        store.close()
    assert refused > 3


def test_snapshots_of_versions_that_did_not_store_decisions_are_refused(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollout.sqlite")
    settings = write_tail(3, store)
    store.close()
    with closing(sqlite3.connect(store.path, isolation_level=None)) as database:
        database.execute("DROP TABLE decided")
    store = RolloutStore(store.path)
    with pytest.raises(CorruptStateError, match="was written by an earlier version"):
        RolloutState.stored(order_of(settings), store)
    store.close()


def test_progress_counts_every_sample_once() -> None:
    for seed in range(30):
        history = played(seed)
        state = RolloutState.new(order_of(history.fleet.settings))
        for seq, (event, _) in enumerate(history.fleet.log, 1):
            state.note(seq, event, state.core.handle(event))
        progress, fleet = state.progress, history.fleet
        trained = [each for train in fleet.trained for each in train.batch]
        assert progress.trained.samples == len(trained)
        assert progress.trained.tokens == sum(fleet.lengths[each.trajectory] for each in trained)
        assert progress.dropped_groups == len(fleet.dropped)
        ids = fleet.settings.staleness.ids_per_group
        assert progress.dropped.samples + progress.unfinished == len(fleet.dropped) * ids
        ended = progress.trained.samples + progress.dropped.samples + progress.aborted.samples
        assert progress.generated.samples == ended + len(progress.lengths)
        ages = [train.version - each.version for train in fleet.trained for each in train.batch]
        assert progress.staleness == {age: ages.count(age) for age in set(ages)}


class StoredFleet(Fleet):
    """A fleet whose events are stored, with tokens and steps as real ones have them."""

    def __init__(self, order: RolloutOrder, path: Path) -> None:
        super().__init__(order.settings())
        self.store = RolloutStore(path)
        self.state = RolloutState.new(order)
        self.core = self.state.core
        self.entries: list[JournalEntry] = []

    def handle(self, event: RolloutEvent) -> None:
        parts: list[GeneratedPart] = []
        if isinstance(event, Generated):
            parts = [part(event.trajectory, event.segments)]
        elif isinstance(event, Stopped):
            parts = [part(each.trajectory, each.segments) for each in event.trajectories]
        prompt = step = None
        if isinstance(event, GroupAdded):
            prompt = (event.group, np.arange(event.prompt_tokens, dtype=np.int32))
        elif isinstance(event, ParametersPushed):
            step = (event.version, 10 + event.version)
        last = self.state.progress.batch
        taken = self.state.take(event, self.store, parts=parts, prompt=prompt, step=step)
        if taken is None:
            return
        self.entries.append(taken[0])
        for command in taken[1]:
            self.engines[command.instance].to_run.append(command)
        if self.state.progress.batch is not last:
            self.training, self.is_asked = self.state.progress.batch, False

    def write(self) -> None:
        self.store.write(self.entries)
        self.entries.clear()


def part(trajectory: TrajectoryId, segments: tuple[TrajectorySegment, ...]) -> GeneratedPart:
    tokens = np.zeros(100 * sum(each.tokens for each in segments), dtype=np.int32)
    return GeneratedPart(trajectory, tokens, tokens.astype(np.float32), "stop")


def test_lengths_are_learned_from_what_the_file_forgets(tmp_path: Path) -> None:
    order = replace(ORDER, length_aware=True)
    fleet = StoredFleet(order, tmp_path / "rollout.sqlite")
    fleet.store.keeps_examples = True
    fleet.join(24)
    random = Random(3)
    while fleet.core.newest_version < 5:
        known = fleet.groups_added * order.samples
        fleet.add_groups()
        for each in range(known, fleet.groups_added * order.samples):
            fleet.lengths[TrajectoryId(each)] = random.randint(1, 6)
        fleet.round()
        fleet.write()
    given = Counter(
        tuple(100 * fleet.lengths[each] for each in trajectory_ids(SampleGroupId(group), 2))
        for group in range(fleet.groups_added)
    )
    trained = order.prompts * fleet.core.newest_version
    fleet.store.close()
    store = RolloutStore(tmp_path / "rollout.sqlite")
    found = store.examples()
    assert len(found) == trained
    assert Counter(each.lengths for each in found) <= given
    assert all(each.prompt.tolist() == list(range(len(each.prompt))) for each in found)
    assert len(found[0].prompt)
    store.close()
    store.delete()
    assert store.examples() == []


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_file_does_not_grow_with_the_steps(steps: int, tmp_path: Path) -> None:
    fleet = StoredFleet(ORDER, tmp_path / "rollout.sqlite")
    fleet.join(24)
    fleet.join(24)
    random = Random(3)
    files: list[int] = []
    replays: list[int] = []
    while fleet.core.newest_version < steps:
        known = fleet.groups_added * ORDER.samples
        fleet.add_groups()
        for each in range(known, fleet.groups_added * ORDER.samples):
            fleet.lengths[TrajectoryId(each)] = random.randint(1, 6)
        fleet.round()
        fleet.write()
        files.append(fleet.store.path.stat().st_size)
        replays.append(fleet.store.tail_events)
    # 200 steps generate 2 MB of tokens. Beside the file, SQLite's log has at most about 4 MiB.
    assert max(files) < 1 << 20
    assert fleet.store.bytes < 6 << 20
    # Every batch brings a snapshot.
    assert max(replays) < 200
    fleet.store.close()
    store = RolloutStore(tmp_path / "rollout.sqlite")
    restored = RolloutState.stored(ORDER, store)
    assert restored.plain() == fleet.state.plain()
    assert restored.progress.trained.samples == steps * ORDER.prompts * ORDER.samples
    assert len(store.steps()) <= STEPS_KEPT + 2
    assert all(len(store.prompt(group)) for group in fleet.core.trajectories.groups)
    store.close()


def test_parts_of_a_trajectory_are_joined_in_the_order_of_events(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "a" / "rollout.sqlite")
    store.begin(ORDER)
    group, trajectory = SampleGroupId(0), TrajectoryId(1)
    prompt = np.array([3, 4], dtype=np.int32)
    event = GroupAdded(group=group, prompt_tokens=2)
    entries = [JournalEntry(seq=1, event=event, commands=(), prompt=(group, prompt), step=(0, 11))]
    for seq, (tokens, finish) in enumerate((([5, 6], "abort"), ([7], "stop")), 2):
        logprobs = -np.array(tokens, dtype=np.float32)
        part = GeneratedPart(
            trajectory, np.array(tokens, dtype=np.int32), logprobs, finish, 2 * logprobs
        )
        entries.append(JournalEntry(seq=seq, event=event, commands=(), parts=[part]))
    store.write(entries)
    store.close()
    store = RolloutStore(tmp_path / "a" / "rollout.sqlite")
    assert store.order() == ORDER
    assert store.steps() == {0: 11}
    assert store.prompt(group).tolist() == [3, 4]
    found = store.response(trajectory)
    assert (found.tokens.tolist(), found.logprobs.tolist()) == ([5, 6, 7], [-5.0, -6.0, -7.0])
    assert found.sampling_logprobs is not None
    assert found.sampling_logprobs.tolist() == [-10.0, -12.0, -14.0]
    assert found.finish == "stop"
    gone = Forgotten(group, (trajectory,))
    store.write([JournalEntry(seq=4, event=event, commands=(), forgotten=[gone])])
    assert len(store.response(trajectory).tokens) == 0
    assert store.read([(group, trajectory)], 1000) == [None]
    store.delete()
    assert not list((tmp_path / "a").iterdir())


EARLIER_TABLES = """
CREATE TABLE about (rollout TEXT NOT NULL);
CREATE TABLE events (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE prompts (sample_group INTEGER PRIMARY KEY, tokens BLOB NOT NULL);
CREATE TABLE parts (
    trajectory INTEGER NOT NULL, event INTEGER NOT NULL, tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL, finish TEXT NOT NULL, PRIMARY KEY (trajectory, event)
);
CREATE TABLE steps (version INTEGER PRIMARY KEY, trainer_step INTEGER NOT NULL);
"""


def test_a_store_of_a_version_without_snapshots_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "rollout.sqlite"
    ordered = replace(ORDER, staleness=0, over_launch_prompts=1.5, over_launch_responses=2.0)
    earlier = msgspec.to_builtins(ordered)
    del earlier["first_batch"], earlier["failed_prompts_max"]
    for name in ("prompts", "responses"):
        earlier[f"eta_{name}"] = earlier.pop(f"over_launch_{name}")
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript(EARLIER_TABLES)
        database.execute("INSERT INTO about VALUES (?)", (msgspec.json.encode(earlier).decode(),))
        joined = '{"instance":"rollout-0","version":0,"kv_budget":64.0}'
        database.execute("INSERT INTO events VALUES (1, 'InstanceJoined', ?)", (joined,))
        database.execute("INSERT INTO steps VALUES (0, 5)")
    path.chmod(0o600)
    store = RolloutStore(path)
    order = store.order()
    assert order == ordered
    state = RolloutState.stored(order, store)
    assert list(state.instances.work) == ["rollout-0"]
    added = state.take(GroupAdded(group=SampleGroupId(0), prompt_tokens=3), store)
    assert added is not None
    token = np.ones(1, dtype=np.int32)
    parts = [GeneratedPart(TrajectoryId(0), token, token.astype(np.float32), "stop")]
    store.write([replace(added[0], snapshot=state.plain(), parts=parts)])
    assert RolloutState.stored(order, store).plain() == state.plain()
    assert store.response(TrajectoryId(0)).sampling_logprobs is None
    store.close()


def test_failures_before_the_rollout_was_asked_for_again_count_no_more(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollout.sqlite")
    store.begin(ORDER)
    state = RolloutState.stored(ORDER, store)

    def take(event: RolloutEvent, order: RolloutOrder | None = None) -> None:
        taken = state.take(event, store, order=order)
        assert taken is not None
        store.write([taken[0]])

    for number in range(3):
        take(GroupAdded(group=SampleGroupId(number), prompt_tokens=3))
    take(GroupFiltered(group=SampleGroupId(1), reason="the grader is broken"))
    assert state.progress.groups_without_reward == 1
    before = state.core.state()
    take(PolicyChanged(bound=ORDER.settings().staleness), ORDER)
    assert state.core.state() == before
    assert RolloutState.stored(ORDER, store).progress.groups_without_reward == 0
    store.close()


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout.sqlite"
    path.write_bytes(b"no database, but longer than the header of one" * 100)
    with pytest.raises(StorageError, match=r"rollout\.sqlite cannot be used"):
        RolloutStore(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingParams()}, "seed is missing"),
        ({"sampling": SamplingParams(seed=1, stop_sequences=((),))}, "stop_sequences"),
        ({"sampling": SamplingParams(seed=1, stop_strings=("",))}, "stop_strings"),
        (
            {"sampling": SamplingParams(seed=1, top_logprobs=2)},
            "sampling_logprobs of drawn tokens only",
        ),
        ({"sampling": SamplingParams(seed=1, prompt_logprobs=True)}, "use generate"),
        ({"instances": ()}, "instances"),
        ({"instances": ("a", "a")}, "instances"),
        ({"source": "../other"}, "deployment name"),
        ({"prompts": 0}, "prompts is 0"),
        ({"staleness": -1}, "staleness"),
    ],
)
def test_a_wrong_order_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(ORDER, name) for name in ORDER.__dataclass_fields__}
    with pytest.raises(InvalidRequestError, match=message):
        RolloutOrder(**{**fields, **changes})

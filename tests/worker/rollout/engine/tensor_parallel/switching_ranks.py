"""What the four ranks of the switching tests run: functions that a spawned process finds by name.

The first rank leads. What the ranks found is left in files; most checks are in the tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.models.shards import box_of
from plexrl.worker.rollout.engine import Generation, RolloutEngine
from plexrl.worker.rollout.engine.forward.selection import probe
from plexrl.worker.rollout.engine.tensor_parallel import EngineCalls
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups, switch_groups
from plexrl.worker.rollout.engine.tensor_parallel.switching import (
    KV_WAYS,
    SwitchingEngine,
    SwitchingLeader,
)
from tests.examples import examples
from tests.worker.rollout.engine.tensor_parallel.exchange_ranks import exchange
from tests.worker.rollout.engine.test_histories import VOCABULARY, History

WORLD = 4
SIZES = ((1, 2, 4), (2, 4))
HISTORIES = {SIZES[0]: (6, 7, 10)[: examples(3)], SIZES[1]: (6,)}
"""Seeds, by the sizes of groups."""
SEQUENCE_TOKENS = 64
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [9], list(range(3, 20))]

SCHEDULES: dict[str, dict[int, tuple[int, str]]] = {
    "never": {},
    "once": {5: (4, "migrate")},
    "once by recomputation": {5: (4, "recompute")},
    "up and down": {2: (2, "migrate"), 6: (4, "migrate"), 9: (2, "migrate"), 13: (1, "migrate")},
    "each way": {3: (4, "recompute"), 4: (1, "migrate"), 12: (2, "recompute"), 20: (4, "migrate")},
}
"""Switches by the step before which they happen; a size that a test lacks is 2 there."""
CASES = [(SIZES[0], name) for name in SCHEDULES] + [(SIZES[1], "each way")]
"""Groups that are never of one rank differ in what is moved, which a single schedule shows."""


def model_spec(seed: int) -> ModelSpec:
    """A model whose heads four ranks can share. They have 6, 6, 6 and 4 of its 22 tokens."""
    spec = tiny_qwen2(VOCABULARY, seed=seed)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return replace(spec, config_json=msgspec.json.encode({**spec.config, **heads}).decode())


VERSIONS = (2, 5, 8)
"""Seeds of the versions of the weights."""


@dataclass
class Rank:
    """One rank with its share of the weights."""

    groups: SwitchGroups
    models: Mapping[int, Any]
    """Whole models by version."""

    def start(self, **options: Any) -> None:
        """A new engine with the first version."""
        self.model = build_model(model_spec(VERSIONS[0]))
        probed = probe(self.model)
        for name, parameter in named_parameters(self.model):
            parameter.data = parameter.data[self.box(name, parameter)].clone()
        self.engine = SwitchingEngine(self.model, groups=self.groups, probed=probed, **options)

    def box(self, name: str, parameter: torch.Tensor) -> tuple[slice, ...]:
        """This rank's part of a whole parameter."""
        own = self.groups.everyone
        return box_of(name, tuple(parameter.shape), own.share, own.shares).index

    def load(self, version: int, recompute_kv: bool) -> None:
        """Replace the weights, as a pull does."""
        new = dict(named_parameters(self.models[version]))
        for name, home in named_parameters(self.model):
            home.data.copy_(new[name].data[self.box(name, new[name])])
        self.engine.weights_changed(version, recompute_kv=recompute_kv)

    def follow(self) -> None:
        """Repeat the leader's calls until it closes."""
        while True:
            for name, arguments in self.groups.everyone.receive():
                if name == "close":
                    return
                if name == "start":
                    self.start(**arguments[0])
                elif name == "load":
                    self.load(*arguments)
                else:
                    getattr(self.engine, name)(*arguments)
                self.engine.check_invariants()


class Leader(SwitchingLeader):
    """Broadcasts weight updates and offloads too, which a worker receives as operations."""

    def __init__(self, rank: Rank, calls: EngineCalls, **options: Any) -> None:
        calls.send("start", options)
        rank.start(**options)
        super().__init__(rank.engine, calls)
        self._rank = rank

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        self._calls.send("load", weights_seq, recompute_kv)
        self._rank.load(weights_seq, recompute_kv)

    def drop_cache(self) -> None:
        self._calls.send("drop_cache")
        self._switching.drop_cache()

    def check_invariants(self) -> None:
        self._switching.check_invariants()

    def stats(self) -> Any:
        return self._switching.stats()


@dataclass
class SwitchingHistory(History):
    """A history in which the size of the groups changes at any time."""

    rank: Rank = field(kw_only=True)
    calls: EngineCalls = field(kw_only=True)
    switches: int = 0
    bytes_moved: int = 0

    def start(self) -> Leader:
        return Leader(
            self.rank,
            self.calls,
            slots=self.chance.choice([4, 10, 20]),
            sequence_tokens_max=48,
            kv_bytes_max=self.chance.choice([12, 20, 80]) * 2048 // self.rank.groups.smallest,
            block_tokens=4,
            step_tokens_max=self.chance.choice([4, 16, 500]),
        )

    def load(self) -> None:
        """`Leader.weights_changed` does it."""

    def happen(self) -> None:
        if self.chance.random() < 0.2:
            size = self.chance.choice(sorted(self.rank.groups.by_size))
            changes = size != self.engine.stats().tp
            self.engine.set_tp(size, self.chance.choice(KV_WAYS))
            self.switches += changes
            assert self.engine.stats().tp_switches == self.switches
            self.bytes_moved += changes * self.engine.stats().kv_bytes_moved
        super().happen()
        for _ in range(self.chance.randrange(3)):
            for made in self.engine.step():
                self.end(made)


def generation(name: str, n: int, **sampling: Any) -> Generation:
    params = SamplingParams(**{"ignore_eos": True, "seed": 1, "max_tokens": 24, **sampling})
    return Generation(
        name=name, prompts=PROMPTS, samples_per_prompt=n, sampling=params, emit=None, weights_seq=0
    )


def drive(
    engine: RolloutEngine | Leader, schedule: Mapping[int, tuple[int, str]], *, new_weights: Any
) -> dict[str, Any]:
    """Sampling, greedy decoding, streaming and an abort, with the switches of `schedule`. With
    `new_weights`, a function, version 1 comes in the middle, and rows keep their cache."""
    details = {"sampling_logprobs": True, "top_logprobs": 1}
    made = {
        "one": generation("one", 4, **details),
        "greedy": generation("greedy", 2, temperature=0.0, **details),
    }
    streamed: list[tuple[int, list[int]]] = []
    made["streams"] = generation("streams", 3, seed=7, max_tokens=15)
    made["streams"].emit = lambda row, tokens, _: streamed.append((row, tokens))
    step, ended = 0, []
    for name in ("one", "greedy", "streams"):
        engine.submit(made[name])
    while engine.has_work:
        if step in schedule:
            assert isinstance(engine, Leader)
            engine.set_tp(*schedule[step])
        if step == 7:
            engine.abort("one", {1, 4})
        if step == 10 and new_weights is not None:
            engine.pause()
            new_weights()
            engine.resume()
        ended += [each.name for each in engine.step()]
        step += 1
    assert sorted(ended) == sorted(made)
    # At temperature 1 the sampling policy is the model itself; a greedy one draws the likeliest.
    one = made["one"].arrays()
    assert np.allclose(one["sampling_logprobs"], one["logprobs"], atol=1e-5)
    assert np.array_equal(
        made["greedy"].arrays()["top_ids"][:, 0], made["greedy"].arrays()["tokens"]
    )
    rows = {
        name: [
            (tokens.tolist(), logprobs, finish, each.segments[row])
            for row, (tokens, logprobs, finish) in enumerate(
                zip(each.tokens, each.logprobs, each.finish, strict=True)
            )
        ]
        for name, each in made.items()
    }
    lengths: dict[int, list[int]] = {}
    for row, tokens in streamed:
        lengths.setdefault(row, []).extend(tokens)
    assert [lengths[row] for row in sorted(lengths)] == [row[0] for row in rows["streams"]]
    return rows


def run(rank: int, store: str, folder: str) -> None:
    """One of four ranks."""
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=WORLD)
    models = {version: build_model(model_spec(seed)) for version, seed in enumerate(VERSIONS)}
    for sizes in SIZES:
        here = Rank(switch_groups(Parallelism(tp=WORLD), sizes, rank), models)
        if 1 in sizes:
            exchange(here.groups, Path(folder))
        if rank:
            here.follow()
            continue
        calls = EngineCalls(here.groups.everyone)
        found = {
            "histories": histories(here, calls, HISTORIES[sizes]),
            "driven": driven(here, calls, [name for own, name in CASES if own == sizes]),
        }
        calls.send("close")
        torch.save(found, Path(folder) / f"{len(sizes)}.pt")
    dist.barrier()
    dist.destroy_process_group()


def histories(rank: Rank, calls: EngineCalls, seeds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Live random histories, which check themselves; returns switches, bytes moved and preemptions
    of each."""
    found = []
    for seed in seeds:
        history = SwitchingHistory(seed, rank.models, rank=rank, calls=calls)
        history.run()
        preemptions = history.engine.stats().preemptions
        found.append((history.switches, history.bytes_moved, preemptions))
    return found


def driven(rank: Rank, calls: EngineCalls, names: Sequence[str]) -> dict[Any, Any]:
    """Rows and statistics of each schedule, by its name and whether the weights changed."""
    found = {}
    for name in names:
        schedule = SCHEDULES[name]
        own = {
            step: (size if size in rank.groups.by_size else 2, way)
            for step, (size, way) in schedule.items()
        }
        recomputes = any(way == "recompute" for _, way in schedule.values())
        # A recomputed cache is that of the new weights, and so other tokens are drawn.
        for updates in (False,) if recomputes else (False, True):
            engine = Leader(rank, calls, slots=40, sequence_tokens_max=SEQUENCE_TOKENS)

            def pull(engine: Leader = engine) -> None:
                engine.weights_changed(1, recompute_kv=False)

            rows = drive(engine, own, new_weights=pull if updates else None)
            found[name, updates] = rows, engine.stats(), made_here()
    return found


def made_here() -> int:
    """Communication groups of this process, as torch counts them."""
    return len(dist.distributed_c10d._world.pg_map)

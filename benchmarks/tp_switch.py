"""Measures changes of the tensor-parallel size in the built-in rollout engine (PAT §4.3).

    python -m benchmarks.tp_switch [--quick] [--json]

Four processes are one engine with groups of 1, 2 or 4. For each change of size:

- *migration* is `set_tp` with `kv="migrate"`, from the request until the next token can be drawn,
- *bare* is the bound: the same bytes of the KV cache between the same processes, by one
  `all_to_all_single` of buffers that exist, after each migration,
- *recomputation* is `set_tp` with `kv="recompute"` and the prefill, until each row has a cache.

Then the overhead of one engine: the same rows, drawn by the engine in its smallest groups, and by
four plain engines of one rank each that know nothing of each other. Last the tokens per second of
each size by the number of rows. Rounds of what is compared alternate; each figure is the best one.
"""

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.rollout.engine import Generation, TorchRolloutBackend
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.engine.tensor_parallel import EngineCalls
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups, switch_groups
from plexrl.worker.rollout.engine.tensor_parallel.switching import SwitchingEngine, SwitchingLeader

WORLD, SIZES = 4, (1, 2, 4)
ROWS = sized(16, quick=4)
"""Rows at a switch."""
CONTEXT = sized(500, quick=40)
"""Prompt tokens of each."""
DECODED = sized(48, quick=8)
"""Tokens drawn for each row where engines are compared."""
DRAWN_MAX = 800
"""No row ends while sizes change: a few tokens are drawn between two changes."""
BATCHES = sized((8, 32), quick=(4,))
ROUNDS = sized(2, quick=1)
EXCHANGES = sized(8, quick=1)
"""Rounds of migrations. In the first ones, memory of the cache is written for the first time."""
CHANGES = ((1, 2), (2, 4), (4, 2), (2, 1), (1, 4), (4, 1))
VOCABULARY = "".join(chr(code) for code in range(33, 126))


def model(hidden: int, layers: int) -> ModelSpec:
    """A model with 4 key-value heads."""
    spec = tiny_qwen2(VOCABULARY, seed=3, hidden=hidden, layers=layers)
    config = {**spec.config, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    return replace(spec, config_json=msgspec.json.encode(config).decode())


SPEC = DeploymentSpec(
    model=model(sized(256, quick=64), sized(8, quick=2)),
    kind="rollout",
    backend="torch",
    workers=WORLD,
    parallelism=Parallelism(tp=WORLD),
    tp_sizes=SIZES,
    max_sequence_tokens=CONTEXT + DRAWN_MAX,
    max_concurrent_samples=max(*BATCHES, ROWS),
)


def generation(name: str, rows: range, context: int, tokens: int) -> Generation:
    """Greedy rows whose prompts differ."""
    return Generation(
        name=name,
        prompts=[[3 + (row * 31 + at * 7) % 90 for at in range(context)] for row in rows],
        samples_per_prompt=1,
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        emit=None,
        weights_seq=0,
    )


@dataclass
class Drawn:
    """Counts the rows that have got a token."""

    rows: int
    wanted: set[int] = field(default_factory=set)

    def add(self, row: int, tokens: list[int], logprobs: list[float]) -> None:
        """A row has got a token."""
        del tokens, logprobs
        self.wanted.discard(row)


@dataclass
class Rank:
    """One process. The first has the results."""

    backend: TorchRolloutBackend
    groups: SwitchGroups
    plain: Engine | SwitchingEngine
    """An engine of this rank alone."""

    def bare(self, nbytes: list[list[int]]) -> float:
        """Seconds of one exchange of `nbytes[sender][receiver]`."""
        rank = self.groups.rank
        outward = nbytes[rank]
        inward = [row[rank] for row in nbytes]
        send = torch.ones(sum(outward), dtype=torch.uint8)
        receive = torch.ones(sum(inward), dtype=torch.uint8)
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(receive, send, inward, outward)
        dist.barrier()
        return time.perf_counter() - began

    def apart(self, rows: int) -> float:
        """Seconds until the plain engines of all ranks have drawn their parts of `rows`."""
        own = range(self.groups.rank, rows, WORLD)
        dist.barrier()
        began = time.perf_counter()
        self.plain.submit(generation("apart", own, 16, DECODED))
        while self.plain.has_work:
            self.plain.step()
        dist.barrier()
        return time.perf_counter() - began

    def follow(self) -> None:
        """Repeat the leader's calls until it closes."""
        while True:
            for name, arguments in self.groups.everyone.receive():
                if name == "close":
                    return
                made = self if name in ("bare", "apart") else self.backend.engine
                getattr(made, name)(*arguments)


@dataclass
class Leader:
    """The first process: it measures."""

    rank: Rank
    calls: EngineCalls
    engine: SwitchingLeader

    def begin(self) -> Drawn:
        """Begin the generation during which the size changes."""
        drawn = Drawn(ROWS)
        made = generation("g", range(ROWS), CONTEXT, DRAWN_MAX)
        made.emit = drawn.add
        self.engine.submit(made)
        self.next_tokens(drawn)
        return drawn

    def next_tokens(self, drawn: Drawn) -> None:
        """Step until each row has its next token."""
        drawn.wanted = set(range(drawn.rows))
        while drawn.wanted:
            assert self.engine.has_work, "no row has ended"
            self.engine.step()

    def change(self, drawn: Drawn, tp: int, kv: str) -> tuple[float, float]:
        """Seconds of `set_tp`, and until each row has its next token."""
        began = time.perf_counter()
        self.engine.set_tp(tp, kv)
        switched = time.perf_counter() - began
        self.next_tokens(drawn)
        return switched, time.perf_counter() - began

    def bare(self, before: int, after: int, moved: int) -> float:
        """Seconds of a bare exchange of `moved` bytes between the ranks that exchange heads."""
        heads = SPEC.model.dimensions.kv_heads

        def between(sender: int, receiver: int) -> int:
            if sender // max(before, after) != receiver // max(before, after):
                return 0
            had = set(self.rank.groups.heads(sender, before, heads))
            return len(had.intersection(self.rank.groups.heads(receiver, after, heads)))

        shares = [[0 if a == b else between(a, b) for b in range(WORLD)] for a in range(WORLD)]
        total = sum(map(sum, shares))
        nbytes = [[moved * share // total for share in row] for row in shares]
        self.calls.send("bare", nbytes)
        return self.rank.bare(nbytes)

    def apart(self, rows: int) -> float:
        """Seconds for `rows` in plain engines."""
        self.calls.send("apart", rows)
        return self.rank.apart(rows)

    def together(self, rows: int, tp: int) -> float:
        """Seconds for `rows` in groups of `tp`."""
        began = time.perf_counter()
        made = generation("together", range(rows), 16, DECODED)
        self.engine.submit(made)
        self.engine.set_tp(tp, "recompute")
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - began


def run(rank: int, folder: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    groups = switch_groups(SPEC.layout, SIZES, rank)
    backend = TorchRolloutBackend(SPEC, Path(folder), groups=groups)
    backend.lay_out()
    backend.materialise()
    alone = replace(SPEC, parallelism=None, tp_sizes=(), workers=1)
    one = TorchRolloutBackend(alone, Path(folder))
    one.lay_out()
    one.materialise()
    here = Rank(backend, groups, one.engine)
    if rank:
        here.follow()
    else:
        assert backend.calls is not None
        assert isinstance(backend.engine, SwitchingEngine)
        leader = Leader(here, backend.calls, SwitchingLeader(backend.engine, backend.calls))
        torch.save(measured(leader), f"{folder}/found.pt")
        backend.calls.send("close")
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Change:
    """What one change of size took."""

    before: int
    after: int
    nbytes: int
    migration: float = float("inf")
    bare: float = float("inf")
    recomputation: float = float("inf")


def measured(leader: Leader) -> tuple[list[Change], dict[int, tuple[float, float]], Any]:
    """The changes; seconds in one engine and apart by rows; tokens/s by size and rows."""
    changes = [Change(before, after, 0) for before, after in CHANGES]
    drawn = leader.begin()
    for _ in range(EXCHANGES):
        for each in changes:
            seconds, _ = leader.change(drawn, each.after, "migrate")
            each.migration = min(each.migration, seconds)
            each.nbytes = leader.rank.backend.stats().kv_bytes_moved
            each.bare = min(each.bare, leader.bare(each.before, each.after, each.nbytes))
    for each in changes:
        each.recomputation = leader.change(drawn, each.after, "recompute")[1]
    leader.engine.interrupt("g")
    compared = {}
    for rows in BATCHES:
        rounds = [(leader.together(rows, 1), leader.apart(rows)) for _ in range(ROUNDS)]
        together, apart = zip(*rounds, strict=True)
        compared[rows] = min(together), min(apart)
    speeds = {
        (size, rows): rows * DECODED / min(leader.together(rows, size) for _ in range(ROUNDS))
        for size in SIZES
        for rows in BATCHES
    }
    return changes, compared, speeds


def main() -> None:
    """Measure and print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            run, args=(folder,), nprocs=WORLD, start_method="forkserver"
        )
        found = torch.load(Path(folder) / "found.pt", weights_only=False)
    changes, compared, speeds = found
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for each in changes:
        name = f"{each.before} to {each.after}"
        of_bound = each.bare / each.migration
        rows.append(
            (
                f"groups of {name}: migration, {each.nbytes / 1e6:.0f} MB",
                f"{each.migration * 1e3:.0f} ms",
                f"{each.bare * 1e3:.0f} ms bare",
                f"{of_bound:.2f}",
            )
        )
        rows.append(
            (
                f"groups of {name}: recomputation",
                f"{each.recomputation * 1e3:.0f} ms",
                f"{each.migration * 1e3:.0f} ms migration",
                f"{each.recomputation / each.migration:.1f}",
            )
        )
        figures[f"migration_of_bound_{each.before}_{each.after}"] = of_bound
        figures[f"recomputation_vs_migration_{each.before}_{each.after}"] = (
            each.recomputation / each.migration
        )
    for count, (together, apart) in compared.items():
        rows.append(
            (
                f"{count} rows in groups of 1",
                f"{count * DECODED / together:,.0f} tokens/s",
                f"{count * DECODED / apart:,.0f} in plain engines",
                f"{apart / together:.2f}",
            )
        )
        figures[f"one_engine_vs_plain_{count}"] = apart / together
    for (size, count), speed in speeds.items():
        rows.append((f"{count} rows in groups of {size}", f"{speed:,.0f} tokens/s", "", ""))
        figures[f"tokens_per_s_tp{size}_{count}"] = speed
    report(
        f"{ROWS} rows of {CONTEXT} tokens at a change; {WORLD} processes",
        ("what", "measured", "compared with", "ratio"),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()

"""What the ranks of the tensor-parallel tests run: functions a spawned process finds by name."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.rollout.engine import Engine, Generation, TorchRolloutBackend
from plexrl.worker.rollout.engine.tensor_parallel import EngineCalls, LeadingEngine, RankGroup
from plexrl.worker.rollout.rollout_engine import RolloutEngine
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.device import CPU, Capture, WorkerDevice
from tests.statemanager.emulated_gpu import EmulatedGraphs

VOCABULARY = "0123456789abcdefgh"
"""With three special tokens 21, so that two ranks hold 11 and 10 rows."""
OLD, NEW = tiny_qwen2(VOCABULARY, seed=2), tiny_qwen2(VOCABULARY, seed=5)
WINDOWED = ModelSpec(
    architecture="gemma3_text",
    config_json=json.dumps({**OLD.config, "head_dim": 16, "sliding_window": 6}),
    vocabulary=VOCABULARY,
    seed=2,
)
"""All layers have windows, shorter than the rows."""
SINKS = ModelSpec(
    architecture="gpt_oss",
    config_json=json.dumps(
        {
            **OLD.config,
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        }
    ),
    vocabulary=VOCABULARY,
    seed=2,
)
"""Some layers have windows, all have sinks and experts."""
PROMPTS = [[3, 4, 5, 6, 7, 8], [9], list(range(3, 20))]
SEQUENCE_TOKENS = 64


def generation(name: str, n: int = 2, **sampling: Any) -> Generation:
    params = SamplingParams(**{"ignore_eos": True, "seed": 1, "max_tokens": 24, **sampling})
    return Generation(
        name=name, prompts=PROMPTS, samples_per_prompt=n, sampling=params, emit=None, weights_seq=0
    )


class Leader(LeadingEngine):
    """Broadcasts weight updates and offloads too, which a worker receives as operations."""

    def weights_changed(self, weights_seq: int) -> None:
        self._engine.weights_changed(weights_seq)
        self._calls.add("weights_changed", weights_seq)

    def drop_cache(self) -> None:
        self._engine.drop_cache()
        self._calls.send("drop_cache")

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        self._calls.send("close")


def follow(engine: RolloutEngine, group: RankGroup, pull: Callable[[], None]) -> None:
    """Repeat the leader's calls until it closes; `pull` replaces this rank's weights."""
    while True:
        for name, arguments in group.receive():
            if name == "close":
                return
            if name == "weights_changed":
                pull()
            getattr(engine, name)(*arguments)


def drive(engine: Engine | Leader, pull: Callable[[], None]) -> dict[str, Generation]:
    """A history with every call of an engine; `pull` replaces this rank's weights."""
    made = {name: generation(name, seed=index) for index, name in enumerate(("one", "two"))}
    greedy = made["greedy"] = generation("greedy", n=1, temperature=0.0)
    engine.submit(made["one"])
    for _ in range(3):
        engine.step()
    engine.submit(made["two"])
    engine.submit(greedy)
    for _ in range(3):
        engine.step()
    engine.interrupt("two")
    engine.drop_cache()
    engine.step()
    engine.pause()
    pull()
    engine.weights_changed(1)
    engine.resume()
    while engine.has_work:
        engine.step()
    made["late"] = generation("late", n=3, top_k=5)
    engine.submit(made["late"])
    engine.step()
    engine.abort("late", {0, 2})
    engine.step()
    engine.abort("late")
    while engine.has_work:
        engine.step()
    return made


class Captures(WorkerDevice):
    """Captures steps, up to a limit."""

    def __init__(self, count: int) -> None:
        self.graphs = EmulatedGraphs()
        self._count = count

    def step_capture(self) -> Capture:
        def capture(work: Callable[[], None]) -> Callable[[], None]:
            if self.graphs.captured == self._count:
                raise RuntimeError("operation not permitted when stream is capturing")
            return self.graphs(work)

        return capture


def backend(
    rank: int, ranks: int, folder: Path, device: WorkerDevice = CPU, model: ModelSpec = OLD
) -> TorchRolloutBackend:
    spec = DeploymentSpec(
        model=model,
        kind="rollout",
        backend="torch",
        workers=ranks,
        max_sequence_tokens=SEQUENCE_TOKENS,
        max_concurrent_samples=8,
    )
    group = RankGroup(rank=rank, size=ranks)
    made = TorchRolloutBackend(spec, folder, group, device=device)
    made.lay_out()
    made.materialise()
    return made


def pull(made: TorchRolloutBackend) -> None:
    """This rank's boxes of the new weights, and nothing else."""
    new = dict(named_parameters(build_model(NEW)))
    for piece in made.slices():
        box = tuple(
            slice(first, first + extent)
            for first, extent in zip(piece.offset, piece.shape, strict=True)
        )
        view(made.arena, piece).copy_(new[piece.key.name].data[box])


def join(rank: int, ranks: int, store: str) -> RankGroup:
    """This process as one of the ranks."""
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    return RankGroup(rank=rank, size=ranks)


def run(rank: int, ranks: int, store: str, folder: str) -> None:
    """One rank of a generation; the leader leaves `found.pt`."""
    group = join(rank, ranks, store)
    made = backend(rank, ranks, Path(folder))
    if rank:
        follow(made.engine, group, lambda: pull(made))
    else:
        engine = Leader(made.engine, EngineCalls(group))
        found = drive(engine, lambda: pull(made))
        engine.close()
        parts = {
            name: (one.tokens, one.logprobs, one.finish, one.mixed_segments())
            for name, one in found.items()
        }
        torch.save(parts, Path(folder) / "found.pt")
    made.engine.check_invariants()
    torch.save(
        {
            "stats": made.engine.stats(),
            "gathered": made.gather(str(rank)),
            "arena_bytes": sum(piece.nbytes for piece in made.slices()),
        },
        Path(folder) / f"rank{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def run_windowed(rank: int, ranks: int, store: str, folder: str, model: ModelSpec) -> None:
    """One rank of a generation whose steps are captured; the leader leaves `windowed.pt`."""
    group = join(rank, ranks, store)
    made = backend(rank, ranks, Path(folder), Captures(99), model)
    if rank:
        follow(made.engine, group, lambda: None)
    else:
        engine = Leader(made.engine, EngineCalls(group))
        drawn = generation("one", max_tokens=20)
        engine.submit(drawn)
        while engine.has_work:
            engine.step()
        engine.close()
        torch.save([row.tolist() for row in drawn.tokens], Path(folder) / "windowed.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_captured(rank: int, ranks: int, store: str, folder: str) -> None:
    """One rank of a generation whose steps are captured; the last rank can capture two only. The
    leader leaves `tokens.pt`."""
    group = join(rank, ranks, store)
    device = Captures(2 if rank == ranks - 1 else 99)
    made = backend(rank, ranks, Path(folder), device)
    if rank:
        follow(made.engine, group, lambda: None)
    else:
        engine = Leader(made.engine, EngineCalls(group))
        drawn = generation("one", max_tokens=40)
        engine.submit(drawn)
        while engine.has_work:
            engine.step()
        engine.close()
        torch.save(drawn.tokens, Path(folder) / "tokens.pt")
    counts = (device.graphs.captured, device.graphs.replayed)
    torch.save(counts, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def alone() -> dict[str, Generation]:
    """What one process finds."""
    model = build_model(OLD)

    def pull_all() -> None:
        with torch.no_grad():
            for home, source in zip(model.parameters(), build_model(NEW).parameters(), strict=True):
                home.copy_(source)

    return drive(Engine(model, slots=8, sequence_tokens_max=SEQUENCE_TOKENS), pull_all)

"""The sum of a GPU's memory agrees with the backends' real arenas."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.layout import megatron_state_bytes
from plexrl.model.lora import LoraSpec
from plexrl.model.memory.device_memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, device_memory
from plexrl.model.memory.state_terms import StateTerms, state_terms
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, parameter_count
from plexrl.statemanager.client.arena import Arena
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.training.deepspeed import model as deepspeed
from plexrl.worker.training.fsdp.model import FsdpModel
from plexrl.worker.training.model import TrainingRank

SIZES = {
    "vocab_size": 90,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def model(architecture: str = "qwen2", **config: object) -> ModelSpec:
    """A tiny model of the architecture."""
    more = EXPERTS if architecture == "qwen3_moe" else {}
    text = msgspec.json.encode(SIZES | more | config).decode()
    return ModelSpec(architecture=architecture, config_json=text)


def deployment(kind: str, backend: str, of: ModelSpec, **fields: Any) -> DeploymentSpec:
    """A deployment of one worker, unless `parallelism` says more."""
    layout: Parallelism = fields.pop("parallelism", Parallelism())
    return DeploymentSpec(
        model=of,
        kind=kind,
        backend=backend,
        workers=layout.world_size,
        parallelism=layout,
        **fields,
    )


def in_arena(terms: StateTerms) -> int:
    """What an arena holds."""
    return terms.weights + terms.gradients + terms.optimizer


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int], None]]:
    """Makes this process rank 0 of as many ranks as one says, without any others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def join(count: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        (Parallelism(), "device"),
        (Parallelism(), "host"),
        (Parallelism(dp=3), "device"),
        (Parallelism(dp=2, tp=2), "device"),
    ],
)
def test_fsdp_s_arena_is_the_sum_of_its_terms(
    architecture: str, layout: Parallelism, optimizer: str, fake_ranks: Callable[[int], None]
) -> None:
    if architecture == "qwen3_moe" and layout.tp > 1:
        pytest.skip("experts are not cut by tensor ranks")
    fake_ranks(layout.world_size)
    spec = deployment("train", "fsdp", model(architecture), parallelism=layout, optimizer=optimizer)
    trainer = FsdpModel(TrainingRank(spec=spec, rank=0))
    trainer.lay_out()
    assert in_arena(state_terms(spec)) == pytest.approx(trainer.arena.nbytes, abs=4096)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [Parallelism(), Parallelism(dp=3), Parallelism(tp=2)])
def test_a_critic_has_a_row_in_place_of_the_output_layer(
    tied: bool, layout: Parallelism, fake_ranks: Callable[[int], None]
) -> None:
    fake_ranks(layout.world_size)
    critic = replace(model(tie_word_embeddings=tied), head="value")
    spec = deployment("train", "fsdp", critic, parallelism=layout)
    trainer = FsdpModel(TrainingRank(spec=spec, rank=0))
    trainer.lay_out()
    assert in_arena(state_terms(spec)) == pytest.approx(trainer.arena.nbytes, abs=4096)
    actor = replace(spec, model=replace(critic, head="causal"))
    # Nor has it logits.
    assert device_memory(spec).activations < device_memory(actor).activations
    for backend in ("megatron", "deepspeed"):
        ours, others = (state_terms(replace(each, backend=backend)) for each in (spec, actor))
        assert (ours.weights < others.weights) == (not tied)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "hosted"), [("rollout", None), ("forward", None), ("forward", 1)])
def test_an_engine_s_arena_is_its_weights(
    architecture: str, dtype: str, kind: str, hosted: int | None, tmp_path: Path
) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if architecture == "mixtral" else {}
    spec = deployment(
        kind, "torch", model(architecture, **more), dtype=dtype, layers_on_device=hosted
    )
    backend = make_backend(spec, 0, 1, str(tmp_path))
    backend.lay_out()
    assert isinstance(backend.arena, Arena)
    assert state_terms(spec).weights == pytest.approx(backend.arena.nbytes, abs=8192)


def test_a_sum_names_what_stays_and_what_is_measured() -> None:
    spec = deployment("train", "fsdp", model(), parallelism=Parallelism(dp=2))
    memory = device_memory(spec)
    assert memory.kept_bytes == CONTEXT_BYTES + COMMUNICATOR_BYTES
    assert memory.need_bytes == sum(term.nbytes for term in memory.terms)
    gathered = sum(t.nbytes for t in memory.terms if t.name == "gathered parameters")
    assert gathered == 4 * parameter_count(spec.model)
    measured = memory.measured(gathered + 1000, 1 << 40)
    assert (measured.activations, measured.is_measured) == (1000, True)
    assert measured.need_bytes == memory.need_bytes - memory.activations + 1000
    assert measured.measured(0, 1 << 40).activations == 0
    assert measured.measured(gathered + 1000, measured.need_bytes - 400).activations == 600


def test_each_setting_lowers_its_term() -> None:
    spec = deployment("train", "fsdp", model())
    known = {term.name: term.nbytes for term in device_memory(spec).terms}

    def change(**fields: Any) -> dict[str, int]:
        terms = device_memory(replace(spec, **fields)).terms
        return {each.name: each.nbytes for each in terms if known.get(each.name) != each.nbytes}

    assert set(change(activation_checkpointing=True)) == {"activations"}
    assert change(activation_checkpointing=True)["activations"] < known["activations"]
    assert "optimizer" not in {t.name for t in device_memory(replace(spec, optimizer="host")).terms}
    halved = change(workers=2, parallelism=Parallelism(dp=2))
    assert halved["weights"] < 0.6 * known["weights"]
    waiting = change(workers=2, parallelism=Parallelism(dp=2), reduce_once=True)
    unreduced = waiting["gathered parameters"] - halved["gathered parameters"]
    assert unreduced == 4 * parameter_count(spec.model)


def test_adapters_need_the_base_and_little_else() -> None:
    spec = deployment("train", "fsdp", model(), lora=LoraSpec(rank=2))
    whole, adapters = state_terms(replace(spec, lora=None)), state_terms(spec)
    assert whole.weights < adapters.weights < 1.2 * whole.weights
    assert adapters.gradients < 0.2 * whole.gradients


def test_a_cache_has_the_blocks_of_its_budget_or_what_the_engine_chooses() -> None:
    # 2 values x 3 layers x 2 heads x 16 x 4 bytes for each of 16 tokens.
    block = 2 * 3 * 2 * 16 * 4 * 16
    spec = deployment("rollout", "torch", model(), kv_cache_bytes=100 * block - 1)
    assert state_terms(spec).kv_cache == (99 + 1) * block
    # 512 tokens of 256 samples.
    default = state_terms(replace(spec, kv_cache_bytes=None)).kv_cache
    assert default == (32 * 256 + 1) * block


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize(("count", "optimizer"), [(1, "device"), (1, "host"), (3, "device")])
def test_deepspeed_s_arena_is_the_sum_of_its_terms(
    architecture: str,
    count: int,
    optimizer: str,
    fake_ranks: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_ranks(count)
    # Its kernel is compiled, and steps no arena of this test.
    monkeypatch.setattr(deepspeed, "CpuAdam", Mock())
    layout = Parallelism(dp=count)
    of = model(architecture)
    spec = deployment("train", "deepspeed", of, parallelism=layout, optimizer=optimizer)
    trainer = deepspeed.DeepSpeedModel(TrainingRank(spec=spec, rank=0))
    trainer.lay_out()
    # Every partition has the rows of padding that the largest cut of a parameter needs.
    padding = 0 if count == 1 else 0.05 * trainer.arena.nbytes
    wanted = pytest.approx(trainer.arena.nbytes, abs=4096 + padding)
    assert in_arena(state_terms(spec)) == wanted


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 3])
def test_deepspeed_s_start_allocates_what_is_counted(
    count: int,
    compute_dtype: str,
    fake_ranks: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_ranks(count)
    of = model("qwen2", hidden_size=256, intermediate_size=640)
    layout = Parallelism(dp=count)
    spec = deployment("train", "deepspeed", of, parallelism=layout, compute_dtype=compute_dtype)
    trainer = deepspeed.DeepSpeedModel(TrainingRank(spec=spec, rank=0))
    trainer.lay_out()
    peaks: list[int] = []
    make = trainer._library.ArenaZeroOptimizer

    def watched(*args: Any, **options: Any) -> Any:
        found, peak = watch_allocations(lambda: make(*args, **options))
        peaks.append(peak)
        return found

    monkeypatch.setattr(trainer._library, "ArenaZeroOptimizer", watched)
    trainer.materialise()
    assert peaks == [pytest.approx(state_terms(spec).start, rel=0.03)]


def watch_allocations(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and the most memory that torch had allocated meanwhile."""
    # Without `acc_events` torch 2.12 warns that it keeps the events of one cycle only.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as watch:
        found = run()
    events = watch.profiler.kineto_results.events()
    changes = [each for each in events if each.name() == "[memory]"]
    changes.sort(key=lambda each: each.start_ns())
    return found, max(accumulate([each.nbytes() for each in changes], initial=0))


def test_a_start_counts_where_it_needs_more_than_the_work_after_it() -> None:
    # Its activations are nothing beside its parameters.
    sizes = {"hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 24}
    of = model("qwen2", **sizes)
    spec = deployment(
        "train", "deepspeed", of, max_sequence_tokens=64, activation_checkpointing=True
    )
    memory = device_memory(spec)
    terms = {term.name: term.nbytes for term in memory.terms}
    later = terms["gathered parameters"] + terms["activations"]
    assert terms["copies at the start"] == state_terms(spec).start - later > 0
    assert memory.need_bytes == sum(terms.values())
    peak = later + terms["copies at the start"] // 2
    measured = memory.measured(peak, 1 << 40)
    assert measured.need_bytes == memory.need_bytes, "a part of it is activations now"
    small = memory.measured(peak, memory.need_bytes - 1000)
    assert small.need_bytes == memory.need_bytes - 1000, "it has started there"
    assert small.activations == measured.activations
    larger = memory.measured(later + 2 * terms["copies at the start"], 1 << 40)
    assert "copies at the start" not in {term.name for term in larger.terms}


def test_deepspeed_gathers_in_the_dtype_of_the_computation() -> None:
    spec = deployment("train", "deepspeed", model())
    whole, half = (
        state_terms(replace(spec, compute_dtype=each)).gathered for each in ("float32", "bfloat16")
    )
    assert whole == 2 * half == 8 * parameter_count(spec.model)


@pytest.mark.parametrize(
    "layout",
    [
        Parallelism(),
        Parallelism(dp=2),
        Parallelism(dp=2, tp=2),
        Parallelism(dp=4, ep=2),
        Parallelism(tp=2, ep=2),
        Parallelism(dp=2, tp=2, ep=2),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"compute_dtype": "bfloat16"}, {"optimizer": "host"}],
    ids=["float32", "bfloat16", "host"],
)
@pytest.mark.filterwarnings("ignore")  # of megatron-core, when it is imported
def test_megatron_s_arena_is_the_sum_of_its_terms(
    layout: Parallelism,
    fields: dict[str, str],
    fake_ranks: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import parallel_state

    from plexrl.worker.training.megatron.model import MegatronModel

    for name in ("current_device", "current_stream", "synchronize"):
        # Megatron's shims replace these for a whole process.
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    fake_ranks(layout.world_size)
    of = model("qwen3_moe", moe_intermediate_size=32) if layout.ep > 1 else model("qwen2")
    spec = deployment("train", "megatron", of, parallelism=layout, **fields)
    trainer = MegatronModel(TrainingRank(spec=spec, rank=0))
    trainer.lay_out()
    parallel_state.destroy_model_parallel()
    assert in_arena(state_terms(spec)) == pytest.approx(trainer.arena.nbytes, rel=0.02)


@pytest.mark.parametrize(
    "layout",
    [
        Parallelism(),
        Parallelism(dp=2),
        Parallelism(dp=2, tp=2),
        Parallelism(dp=4, ep=2),
        Parallelism(tp=2, ep=2),
        Parallelism(dp=2, tp=2, ep=2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_megatron_rank_has_its_part_of_the_state(layout: Parallelism, dtype: str) -> None:
    of = model("qwen3_moe" if layout.ep > 1 else "qwen2")
    spec = deployment("train", "megatron", of, parallelism=layout, compute_dtype=dtype)
    whole = megatron_state_bytes(of.dimensions, layout, parameter_count(of), dtype)
    assert in_arena(state_terms(spec)) == pytest.approx(whole / layout.world_size, rel=0.02)

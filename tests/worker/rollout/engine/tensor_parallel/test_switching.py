"""Four gloo processes that draw in groups of changing size, against one process."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine import Engine
from tests.worker.rollout.engine.tensor_parallel import switching_ranks as ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What the ranks left, by the sizes of their groups; and by rank, about exchanges."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        ranks.run,
        args=(str(folder / "store"), str(folder)),
        nprocs=ranks.WORLD,
        start_method="forkserver",
    )
    made: dict[Any, Any] = {
        rank: torch.load(folder / f"exchange{rank}.pt", weights_only=False)
        for rank in range(ranks.WORLD)
    }
    return made | {
        sizes: torch.load(folder / f"{len(sizes)}.pt", weights_only=False) for sizes in ranks.SIZES
    }


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict[str, Any]]:
    """What one process draws, by whether the weights changed meanwhile."""
    old, new = [build_model(ranks.model_spec(seed)) for seed in ranks.VERSIONS[:2]]

    def drawn(updates: bool) -> dict[str, Any]:
        model = copy.deepcopy(old)
        engine = Engine(model, slots=40, sequence_tokens_max=ranks.SEQUENCE_TOKENS)

        def pull() -> None:
            with torch.no_grad():
                for home, source in zip(model.parameters(), new.parameters(), strict=True):
                    home.copy_(source)
            engine.weights_changed(1, recompute_kv=False)

        return ranks.drive(engine, {}, new_weights=pull if updates else None)

    return {updates: drawn(updates) for updates in (False, True)}


@pytest.mark.parametrize(("sizes", "name"), ranks.CASES)
def test_switches_change_no_token(
    found: Any, alone: Any, sizes: tuple[int, ...], name: str
) -> None:
    recomputes = any(way == "recompute" for _, way in ranks.SCHEDULES[name].values())
    for updates in (False,) if recomputes else (False, True):
        rows, stats, _ = found[sizes]["driven"][name, updates]
        for generation, wanted in alone[updates].items():
            for own, other in zip(rows[generation], wanted, strict=True):
                assert own[0] == other[0]
                assert np.allclose(own[1], other[1], atol=1e-4)
                assert own[2:] == other[2:]
        assert (stats.tokens_recomputed > 0) == recomputes, "migration keeps the whole cache"
        assert stats.tokens_drawn == sum(len(row[0]) for each in rows.values() for row in each)


@pytest.mark.parametrize("sizes", ranks.SIZES)
def test_switches_make_no_communication_group(found: Any, sizes: tuple[int, ...]) -> None:
    counts = {(stats.groups_made, made) for _, stats, made in found[sizes]["driven"].values()}
    assert len(counts) == 1
    [(made, _)] = counts
    assert made == 3 + 2, "three of all ranks, and two of 2"


@pytest.mark.parametrize("sizes", ranks.SIZES)
def test_every_token_is_what_its_weights_draw_whatever_happened(
    found: Any, sizes: tuple[int, ...]
) -> None:
    switches, moved, preemptions = zip(*found[sizes]["histories"], strict=True)
    assert min(switches) > 0
    assert sum(moved) > 0
    assert sum(preemptions) > 0


def test_every_rank_gets_the_heads_of_its_new_group(found: Any) -> None:
    """The ranks compare every computed token of random caches."""
    assert min(found[rank][0] for rank in range(ranks.WORLD)) > 1000


def test_an_exchange_needs_memory_for_two_layers(found: Any) -> None:
    for rank in range(ranks.WORLD):
        memory = found[rank][1]
        assert memory["all"] == 16 * memory["layer"] > 40e6
        # Buffers of sockets, and pages of allocators.
        assert memory["peak"] < 2 * memory["layer"] + 8e6

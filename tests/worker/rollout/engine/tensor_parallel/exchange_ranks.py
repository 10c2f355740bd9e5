"""What the four ranks of the KV-cache exchange run: random caches with known content."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.tensor_parallel.kv_exchange import KvExchange, Switch
from plexrl.worker.rollout.engine.tensor_parallel.redistribution import NewGroup, redistribute
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups
from plexrl.worker.rollout.generation import CarriedSample

WORLD = 4
CHANGES = ((1, 2), (2, 4), (1, 4), (4, 1), (4, 2), (2, 1))
KV_HEADS, BLOCK_TOKENS = 4, 4


def pool(size: int, layers: int, blocks: int, dtype: torch.dtype) -> KvPool:
    """This rank's cache in groups of `size`, in memory of `blocks` whole blocks."""
    return KvPool(
        layers=layers,
        heads=KV_HEADS // size,
        head_size=8,
        blocks=blocks * size,
        block_tokens=BLOCK_TOKENS,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def content(layer: int, half: int, head: int, sample: int, token: int) -> list[float]:
    """Key (`half` 0) or value of a token; a small float is exact in every dtype."""
    return [float(layer), half, head, sample, token // 16, token % 16, 1.0, 2.0]


def samples(chance: random.Random, size: int) -> list[list[CarriedSample]]:
    """Some samples of each group of `size`. The second one shares its first block with the
    first."""
    found: list[list[CarriedSample]] = []
    row = 0
    for _ in range(WORLD // size):
        numbers = list(range(1, 20))
        chance.shuffle(numbers)
        group: list[CarriedSample] = []
        for index in range(chance.randint(0, 4)):
            count = chance.randint(1, 4)
            blocks = [numbers.pop() for _ in range(count)]
            if index == 1:
                blocks[0] = group[0].blocks[0]
            # All of a shared block is computed.
            computed = chance.randint(BLOCK_TOKENS, count * BLOCK_TOKENS)
            if index == 0:
                computed = count * BLOCK_TOKENS
            group.append(
                CarriedSample(
                    generation="g",
                    row=row,
                    order=row,
                    known=computed + 1,
                    tokens=None,
                    logprobs=None,
                    details=None,
                    segments=(),
                    blocks=tuple(blocks),
                    computed=computed,
                )
            )
            row += 1
        found.append(group)
    return found


def owner(group: Sequence[CarriedSample], sample: CarriedSample, token: int) -> int:
    """The sample whose content a token's block has: the first that has this block."""
    block = sample.blocks[token // BLOCK_TOKENS]
    return next(each.row for each in group if block in each.blocks)


def fill(cache: KvPool, heads: range, group: Sequence[CarriedSample]) -> None:
    """Write the content of a group's samples."""
    for layer, memory in enumerate(cache.layers()):
        memory.fill_(float("nan"))
        for sample in group:
            for token in range(sample.computed):
                block, offset = sample.blocks[token // BLOCK_TOKENS], token % BLOCK_TOKENS
                for index, head in enumerate(heads):
                    for half in (0, 1):
                        memory[half * len(heads) + index, block, offset] = torch.tensor(
                            content(layer, half, head, owner(group, sample, token), token)
                        )


def check(
    cache: KvPool,
    heads: range,
    new: NewGroup,
    old: Sequence[Sequence[CarriedSample]],
    allocated: Sequence[int],
) -> int:
    """Assert that the new blocks have the content of the old ones; returns the tokens checked."""
    checked = 0
    for layer, memory in enumerate(cache.layers()):
        for placed, table in zip(new.placed, new.tables, strict=True):
            assert table is not None, "there is room for all"
            for token in range(placed.sample.computed):
                block, offset = allocated[table[token // BLOCK_TOKENS]], token % BLOCK_TOKENS
                row = owner(old[placed.source], placed.sample, token)
                for index, head in enumerate(heads):
                    for half in (0, 1):
                        found = memory[half * len(heads) + index, block, offset].tolist()
                        assert found == content(layer, half, head, row, token)
                        checked += 1
    return checked


def exchanged(groups: SwitchGroups, seed: int, before: int, after: int) -> int:
    """One exchange of random samples; returns what was checked."""
    chance = random.Random(seed)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    layers = chance.randint(1, 3)
    carried = samples(chance, before)
    plan = redistribute(
        carried,
        WORLD // after,
        slots=99,
        blocks=99,
        block_tokens=BLOCK_TOKENS,
        migrate=True,
    )
    old, new = (pool(size, layers, 80, dtype) for size in (before, after))
    fill(old, groups.heads(groups.rank, before, KV_HEADS), carried[groups.index(before)])
    new.take_memory(old)
    own = plan[groups.index(after)]
    allocated = chance.sample(range(1, 80 * after), 60)[: own.allocated]
    KvExchange(
        Switch(groups=groups, before=before, after=after, plan=plan), old, new, allocated
    ).run()
    return check(new, groups.heads(groups.rank, after, KV_HEADS), own, carried, allocated)


def resident(name: str) -> int:
    """A figure of this process's memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if name in line))


def peak_of_large_exchange(groups: SwitchGroups) -> dict[str, int]:
    """The memory that an exchange of groups of 1 for groups of 2 adds to this process's peak, and
    what this process sends, keeps and receives of a layer and of all."""
    layers, blocks = 16, 4096
    old, new = (pool(size, layers, blocks, torch.float32) for size in (1, 2))
    for memory in old.layers():
        memory.fill_(1.0)  # Every page of the cache is resident before.
    held = tuple(range(1, blocks))
    carried = [
        [
            CarriedSample(
                generation="g",
                row=group,
                order=group,
                known=len(held) * BLOCK_TOKENS,
                tokens=None,
                logprobs=None,
                details=None,
                segments=(),
                blocks=held,
                computed=len(held) * BLOCK_TOKENS,
            )
        ]
        for group in range(WORLD)
    ]
    plan = redistribute(
        carried, 2, slots=99, blocks=9 * blocks, block_tokens=BLOCK_TOKENS, migrate=True
    )
    new.take_memory(old)
    exchange = KvExchange(
        Switch(groups=groups, before=1, after=2, plan=plan),
        old,
        new,
        range(1, plan[groups.index(2)].allocated + 1),
    )
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew.
    exchange.run()
    peak = resident("VmHWM") - before
    cache = new.nbytes * (blocks - 1) // blocks
    # It keeps and sends the halves of its own sample, and receives half of another.
    return {"peak": peak, "layer": cache * 3 // 2 // layers, "all": cache * 3 // 2}


def exchange(groups: SwitchGroups, folder: Path) -> None:
    """Random exchanges, which check themselves, and a large one; leaves what they found."""
    checked = sum(
        exchanged(groups, seed, before, after) for seed, (before, after) in enumerate(CHANGES * 3)
    )
    torch.save((checked, peak_of_large_exchange(groups)), folder / f"exchange{groups.rank}.pt")

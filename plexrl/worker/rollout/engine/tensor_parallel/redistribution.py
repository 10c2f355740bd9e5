"""Which group draws which sample, when rows are queued and after the size of the groups has changed
(PAT Alg. 1, merge_and_redistribute). Pure: every rank computes the same from the same values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plexrl.worker.rollout.generation import CarriedSample

STAYS_BELOW = 1.1
"""A sample stays with the ranks that have its keys and values while their group has less than this
multiple of the mean tokens of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A sample in its new group."""

    sample: CarriedSample
    source: int
    """Its old group."""
    keeps_kv: bool
    """Its keys and values are moved; otherwise it waits, and they are recomputed."""


@dataclass(slots=True)
class BlockMoves:
    """The blocks that go from one old group to one new group. Blocks that samples share go once."""

    blocks: list[int] = field(default_factory=list)
    """Numbers in the old group."""
    targets: list[int] = field(default_factory=list)
    """Index of each among the new group's allocated blocks."""
    valid: list[int] = field(default_factory=list)
    """Tokens of each whose keys and values are computed."""

    def add(self, block: int, target: int, valid: int) -> None:
        """Move a block."""
        self.blocks.append(block)
        self.targets.append(target)
        self.valid.append(valid)

    @property
    def tokens(self) -> int:
        """Tokens that are moved."""
        return sum(self.valid)


@dataclass(slots=True)
class NewGroup:
    """The rows of a new group, and their blocks."""

    placed: list[Placed] = field(default_factory=list)
    """Oldest first."""
    tables: list[list[int] | None] = field(default_factory=list)
    """Blocks of each of `placed`, as indices among the allocated ones; None: it waits."""
    allocated: int = 0
    """Blocks to allocate."""
    moves: dict[int, BlockMoves] = field(default_factory=dict)
    """By old group."""


def place_rows(prompts: int, samples_per_prompt: int, loads: Sequence[int]) -> list[int]:
    """The group of each new row, prompt-major; `loads` are the groups' unfinished rows.

    The rows of a prompt go to one group, which computes the prompt once, except where that group
    would get more than its even part of all rows.
    """
    loads = list(loads)
    most = -(-(sum(loads) + prompts * samples_per_prompt) // len(loads))
    found: list[int] = []
    for _ in range(prompts):
        left = samples_per_prompt
        while left:
            group = min(range(len(loads)), key=lambda load: (loads[load], load))
            count = min(left, max(1, most - loads[group]))
            found += [group] * count
            loads[group] += count
            left -= count
    return found


def redistribute(
    carried: Sequence[Sequence[CarriedSample]],
    groups: int,
    *,
    slots: int,
    blocks: int,
    block_tokens: int,
    migrate: bool,
) -> list[NewGroup]:
    """The new groups' samples, balanced by tokens.

    `carried`: the samples of each old group, whose ranks are consecutive parts of all ranks, as
    those of each of the `groups` new ones. `slots` and `blocks` of `block_tokens` tokens are those
    of a new group. With `migrate`, samples keep their keys and values as far as there is space for
    them.
    """
    everyone = [(sample, source) for source, samples in enumerate(carried) for sample in samples]
    longest_first = sorted(everyone, key=lambda each: (-each[0].known, each[0].order))
    old = len(carried)
    below = STAYS_BELOW * sum(sample.known for sample, _ in everyone) / groups
    tokens, counts = [0] * groups, [0] * groups
    members: list[list[tuple[CarriedSample, int]]] = [[] for _ in range(groups)]
    for sample, source in longest_first:
        open_groups = [group for group in range(groups) if counts[group] < slots] or range(groups)
        # Its old group is a part of one new group, or consists of several.
        first, last = source * groups // old, (source + 1) * groups // old
        homes = [
            open_group for open_group in open_groups if first <= open_group < max(last, first + 1)
        ]
        chosen = _lightest(homes or open_groups, tokens)
        if tokens[chosen] + sample.known >= below:
            chosen = _lightest(open_groups, tokens)
        tokens[chosen] += sample.known
        counts[chosen] += 1
        members[chosen].append((sample, source))
    return [
        _fill(sorted(member, key=lambda one: one[0].order), slots, blocks, block_tokens, migrate)
        for member in members
    ]


def _lightest(groups: Iterable[int], tokens: Sequence[int]) -> int:
    return min(groups, key=lambda group: (tokens[group], group))


def _fill(
    members: Sequence[tuple[CarriedSample, int]],
    slots: int,
    blocks: int,
    block_tokens: int,
    migrate: bool,
) -> NewGroup:
    made = NewGroup()
    valid: dict[tuple[int, int], int] = {}
    running = 0
    for sample, source in members:
        # A holder of a shared block has computed all of it that any holder has.
        added = {
            (source, block): min(block_tokens, sample.computed - index * block_tokens)
            for index, block in enumerate(sample.blocks)
            if (source, block) not in valid
        }
        keeps = migrate and bool(sample.blocks) and running < slots
        keeps = keeps and len(valid) + len(added) <= blocks
        made.placed.append(Placed(sample=sample, source=source, keeps_kv=keeps))
        if keeps:
            running += 1
            valid |= added
    # The full blocks of each old group come one after the other, so that they are copied as one.
    ordered = sorted(valid, key=lambda key: (key[0], valid[key] < block_tokens))
    numbers = {key: number for number, key in enumerate(ordered)}
    for source, block in ordered:
        if valid[source, block] > 0:
            moves = made.moves.setdefault(source, BlockMoves())
            moves.add(block, numbers[source, block], valid[source, block])
    for placed in made.placed:
        table = [numbers[placed.source, block] for block in placed.sample.blocks if placed.keeps_kv]
        made.tables.append(table or None)
    made.allocated = len(numbers)
    return made

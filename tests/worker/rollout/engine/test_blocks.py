"""The block pool against a plain account of who holds what."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plexrl.worker.rollout.engine.blocks import SCRAP, BlockPool, block_names
from tests.examples import examples

BLOCKS, BLOCK_TOKENS = 9, 4


class BlockPoolAgainstAnAccount(RuleBasedStateMachine):
    """Holders take, share and return blocks; the account says what must be true of each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        self.holders: list[list[int]] = []
        self.content: dict[bytes, int] = {}

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count > self.pool.available:
            with pytest.raises(AssertionError):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert SCRAP not in taken
        assert not set(taken) & {block for held in self.holders for block in held}
        self.content = {name: b for name, b in self.content.items() if b not in taken}
        self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), count=st.integers(1, 4))
    def share_a_prefix(self, which: int, count: int) -> None:
        shared = self.holders[which % len(self.holders)][:count]
        self.pool.share(shared)
        self.holders.append(list(shared))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), seed=st.integers(0, 3))
    def name(self, which: int, seed: int) -> None:
        held = self.holders[which % len(self.holders)]
        tokens = np.full(len(held) * BLOCK_TOKENS, seed, dtype=np.int32)
        names = block_names(tokens, BLOCK_TOKENS)
        self.pool.name(held, names)
        for block, name in zip(held, names, strict=True):
            if name not in self.content and block not in self.content.values():
                self.content[name] = block

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def give_back(self, which: int) -> None:
        self.pool.give_back(self.holders.pop(which % len(self.holders)))

    @rule(seed=st.integers(0, 3), count=st.integers(1, 4))
    def find_and_share(self, seed: int, count: int) -> None:
        names = block_names(np.full(count * BLOCK_TOKENS, seed, dtype=np.int32), BLOCK_TOKENS)
        wanted = []
        for name in names:
            if name not in self.content:
                break
            wanted.append(self.content[name])
        found = self.pool.find(names)
        assert found == wanted
        held = {block for holder in self.holders for block in holder}
        assert self.pool.kept_among(found) == len(set(found) - held)
        if found:
            self.pool.share(found)
            self.holders.append(found)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.content = {}

    @invariant()
    def every_block_is_where_the_account_says(self) -> None:
        self.pool.check_invariants(self.holders)
        held = Counter(block for holder in self.holders for block in holder)
        assert self.pool.held == len(held)
        assert self.pool.available == BLOCKS - 1 - len(held)
        assert self.pool.kept == len(set(self.content.values()) - set(held))


BlockPoolAgainstAnAccount.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestBlockPool = BlockPoolAgainstAnAccount.TestCase


def test_a_name_stands_for_all_tokens_before_it() -> None:
    one = block_names(np.arange(12, dtype=np.int32), 4)
    other = block_names(np.array([9, *range(1, 12)], dtype=np.int32), 4)
    assert len(one) == 3
    assert not set(one) & set(other)
    assert block_names(np.arange(14, dtype=np.int32), 4, one[:2]) == one


def test_the_end_of_a_prefix_is_given_up_before_its_beginning() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.take(3)
    names = block_names(np.arange(12, dtype=np.int32), 4)
    pool.name(blocks, names)
    pool.give_back(blocks)
    assert pool.take(1) == [blocks[2]]
    assert pool.find(names) == blocks[:2]

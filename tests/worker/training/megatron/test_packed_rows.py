"""Rows end to end, as Megatron's ranks run them."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.plan import plan_batch
from plexrl.worker.batches.packed_batches import packed_micro_batches
from plexrl.worker.training.megatron.packed_rows import LONG_ROW_TOKENS, pack_rows
from tests.examples import examples
from tests.worker.batches.test_packed_batches import batch


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), cp=st.integers(1, 3))
def test_every_token_has_its_position_and_the_token_it_predicts(
    lengths: list[int], cp: int
) -> None:
    arrays = batch(lengths)
    plan = plan_batch(Parallelism(cp=cp), lengths, micro_batch_tokens=10, packs=True)
    for rank, part in enumerate(plan.inputs(arrays)):
        packed = [pack_rows(each, rank, cp) for each in packed_micro_batches(part, cp)]
        tokens = np.concatenate([each.tokens_T.numpy() for each in packed])
        assert np.array_equal(tokens, part["tokens"])
        if cp > 1:
            positions = np.concatenate([each.positions_T.numpy() for each in packed])
            assert np.array_equal(positions, part["positions"])
        for each in packed:
            assert sum(each.row_map.lengths) == len(each.tokens_T)
            # Tokens are numbered in the order of the batch.
            predicting = each.tokens_T[each.predicts]
            assert (each.targets_T[each.predicts] == predicting + 1).all()
            assert len(each.result_index) == len(each.predicts)


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12))
def test_groups_of_similar_rows_hold_each_row_from_their_first_column_on(
    lengths: list[int],
) -> None:
    arrays = batch(lengths)
    plan = plan_batch(Parallelism(), lengths, micro_batch_tokens=400, packs=True)
    for each in packed_micro_batches(plan.inputs(arrays)[0], 1):
        packed = pack_rows(each)
        rows = torch.split(packed.tokens_T, list(packed.row_map.lengths))
        wanted = sorted(row.tolist() for row in rows)
        row_map = packed.row_map
        split = torch.split(
            packed.tokens_T[row_map.tokens], [len(group.places) for group in row_map.groups]
        )
        found, parts = [], []
        for group, tokens in zip(row_map.groups, split, strict=True):
            padded = group.padded(tokens)
            parts.append(group.values(padded))
            own = [row[: 1 + int(row.nonzero().max())].tolist() for row in padded]
            shortest, longest = len(min(own, key=len)), len(max(own, key=len))
            assert longest == group.shape[1]
            assert longest < (2 if shortest < LONG_ROW_TOKENS else 9 / 8) * shortest
            found += own
        assert sorted(found) == wanted
        assert torch.equal(torch.cat(parts)[row_map.order], packed.tokens_T)
        short = {len(row).bit_length() for row in wanted if len(row) < LONG_ROW_TOKENS}
        long = sum(len(row) >= LONG_ROW_TOKENS for row in wanted)
        assert len(parts) <= len(short) + long


def test_a_micro_batch_without_rows_runs_one_token_of_padding() -> None:
    plan = plan_batch(Parallelism(dp=2, cp=2), [5], micro_batch_tokens=10, packs=True)
    part = plan.inputs(batch([5]))[2]
    (each,) = packed_micro_batches(part, 2)
    packed = pack_rows(each, 0, 2)
    assert packed.row_map.lengths == (1,)
    assert len(packed.predicts) == 0
    assert not packed.unpacked(packed.positions_T.float()).any()


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    cp=st.integers(1, 3),
    multiple=st.integers(1, 4),
)
def test_a_last_row_of_padding_makes_the_tokens_a_multiple_and_predicts_nothing(
    lengths: list[int], cp: int, multiple: int
) -> None:
    plan = plan_batch(Parallelism(cp=cp), lengths, micro_batch_tokens=10, packs=True)
    for rank, part in enumerate(plan.inputs(batch(lengths))):
        for each in packed_micro_batches(part, cp):
            plain, padded = (
                pack_rows(each, rank, cp),
                pack_rows(each, rank, cp, token_multiple=multiple),
            )
            count = len(plain.tokens_T)
            assert len(padded.tokens_T) % multiple == 0
            assert 0 <= len(padded.tokens_T) - count < multiple
            assert len(padded.positions_T) == len(padded.targets_T) == len(padded.tokens_T)
            assert sum(padded.row_map.lengths) == len(padded.tokens_T)
            assert padded.tokens_T[:count].equal(plain.tokens_T)
            assert padded.predicts.equal(plain.predicts)
            if cp == 1:
                ends = np.cumsum(plain.row_map.lengths) - 1
                assert padded.of_last_tokens(padded.tokens_T).equal(plain.tokens_T[ends])

"""Prompts over replicas: each once, in order, with the samples of a single replica."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.generate_plan import plan_generate


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_every_prompt_goes_to_one_replica_and_samples_keep_the_order(
    lengths: list[int], dp: int, tp: int, samples: int
) -> None:
    rows = [[100 * row + place for place in range(length)] for row, length in enumerate(lengths)]
    arrays = {
        "lengths": np.array(lengths, dtype=np.int32),
        "tokens": np.array([token for row in rows for token in row], dtype=np.int32),
    }
    layout = Parallelism(dp=dp, tp=tp)
    plan = plan_generate(layout, len(lengths), samples)
    counts = [share.prompts for share in plan.shares]
    assert sum(counts) == len(lengths)
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    ranks = [share.rank for share in plan.shares]
    assert set(ranks) <= set(layout.output_ranks)
    assert len(set(ranks)) == len(ranks)
    parts = [share.inputs(arrays) for share in plan.shares]
    joined = plan.join_arrays(parts)
    assert joined["tokens"].tolist() == arrays["tokens"].tolist()
    assert joined["lengths"].tolist() == lengths
    done = 0
    for share in plan.shares:
        assert plan.first_row(share) == done
        done += share.prompts * samples


def test_results_of_replicas_are_joined() -> None:
    plan = plan_generate(Parallelism(dp=2), 3, 2)
    assert [share.prompts for share in plan.shares] == [1, 2]
    use = {"preemptions": 1, "kv_cache_bytes": 10, "kv_cache_bytes_used_max": 4}
    more = {"preemptions": 2, "kv_cache_bytes": 10, "kv_cache_bytes_used_max": 9}
    segments = [[0, 0, 3, 1], [0, 5, 4, 2]]
    joined = plan.join_results(
        [
            {"weights_seq": 3, "metrics": use, "segments": segments},
            {"weights_seq": 3, "metrics": more, "segments": segments},
        ]
    )
    assert joined == {
        "weights_seq": 3,
        "metrics": {"preemptions": 3, "kv_cache_bytes": 10, "kv_cache_bytes_used_max": 9},
        "segments": [[0, 0, 3, 1], [0, 5, 4, 2], [2, 0, 3, 1], [2, 5, 4, 2]],
    }
    assert "segments" not in plan.join_results([{"weights_seq": 3}, {"weights_seq": 3}])

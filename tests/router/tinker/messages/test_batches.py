"""What batches and prompts mean to PlexRL, hostile numbers among them."""

from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2

from plexrl.errors import BatchShapeError, InvalidRequestError
from plexrl.router.tinker.messages.batches import check_loss, sample_request, train_request
from plexrl.router.tinker.messages.codec import Datum, TrainBatch, read_train_batch
from plexrl.router.tinker.messages.requests import AsampleRequest

FILLER = -9999.0


def batch(loss: str = "ppo", **inputs: Any) -> TrainBatch:
    """One row of four input tokens, of which the last two are a completion."""
    given = {
        "target_tokens": np.array([4, 5, 6, 7]),
        "logprobs": np.array([FILLER, FILLER, -1.0, -2.0], np.float32),
        "advantages": np.array([0.0, 0.0, 0.5, 0.5], np.float32),
        **inputs,
    }
    row = Datum(tokens=np.array([3, 4, 5, 6], np.int32), inputs=given)
    return TrainBatch(
        model_id="m", seq_id=1, loss=loss, settings={}, forward_only=False, data=(row,)
    )


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_tokens_of_prompts_with_fillers_for_logprobs_do_not_count(loss: str) -> None:
    _, _, arrays = train_request(batch(loss))
    assert arrays["mask"].tolist() == [0, 0, 0, 1, 1]
    _, _, arrays = train_request(batch(loss, advantages=np.zeros(4, np.float32)))
    assert arrays["mask"].tolist() == [0, 0, 0, 1, 1]


def test_a_batch_without_any_advantage_or_logprob_has_finite_ratios() -> None:
    zeros, fillers = np.zeros(4, np.float32), np.full(4, FILLER, np.float32)
    _, _, arrays = train_request(batch(advantages=zeros, logprobs=fillers))
    assert arrays["mask"].tolist() == [0, 1, 1, 1, 1]
    assert not arrays["logprobs"].any()


@pytest.mark.parametrize("last", [-100, 2**31, 2**40, -(2**63)])
def test_a_last_target_that_is_no_token_is_refused(last: int) -> None:
    check_loss(batch())
    with pytest.raises(BatchShapeError, match=f"last target of row 0 is {last}"):
        check_loss(batch(target_tokens=np.array([4, 5, 6, last])))


def test_targets_that_are_no_integers_are_refused() -> None:
    with pytest.raises(BatchShapeError, match="are integers"):
        check_loss(batch(target_tokens=np.array([4, 5, 6, 7.5], np.float32)))


@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 2**100])
def test_a_prompt_with_what_is_no_token_is_refused(token: int) -> None:
    asked = AsampleRequest.read(b'{"prompt": {"chunks": [{"tokens": [1, %d]}]}}' % token)
    with pytest.raises(InvalidRequestError, match="token ids from 0"):
        sample_request(asked)


def test_bytes_that_end_within_a_number_are_refused() -> None:
    message = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = b"\0" * 6
    found = read_train_batch(message.SerializeToString())
    assert "encoded_text of row 0 has 6 bytes" in str(found.error)

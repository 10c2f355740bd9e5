"""Tokens and lengths of a paced engine's responses: hashes, the same in any process. Pure.

A response's length depends on the seed and the number of the sample alone, a token on these, its
place and the weights. So a response that is interrupted and continued has the tokens of one that is
not, as long as the weights are the same.
"""

import math

import numpy as np

from plexrl.wire.tensors import Array
from plexrl.worker.rollout.generation import ODD_2
from plexrl.worker.training.paced.state import hashed

MEAN_PART = 0.25
"""Mean length of a response, as a part of the longest. Lengths are exponential, so about 2 % of the
responses reach the longest."""
_ALL_BITS = (1 << 64) - 1
_LENGTH_WORD, _LOGPROB_WORD = 0x6C656E677468, 0x6C6F6770726F62


def response_tokens(stream: int, longest: int) -> int:
    """Tokens of a whole response, from 1 to `longest`. `stream` is that of its first token."""
    drawn = hashed(np.array([stream & _ALL_BITS], dtype=np.uint64), _LENGTH_WORD)
    unit = (int(drawn[0]) >> 11) / (1 << 53)
    return 1 + min(longest - 1, int(-math.log(1.0 - unit) * MEAN_PART * longest))


def first_stream(stream: int, drawn: int) -> int:
    """The stream of a response of which `drawn` tokens were drawn before `stream`."""
    return (stream - drawn * ODD_2) & _ALL_BITS


def draw_tokens(
    stream: int, start: int, count: int, *, weights: int, vocabulary: int, end: int | None
) -> tuple[Array, Array]:
    """The `count` tokens from place `start` of the stream on, without the end token, and their
    logprobs. int32 [count], float32 [count]"""
    places = np.arange(start, start + count, dtype=np.uint64) * np.uint64(ODD_2 & _ALL_BITS)
    bits = hashed(places + np.uint64(stream & _ALL_BITS), weights)
    tokens = (bits % np.uint64(vocabulary)).astype(np.int32)
    if end is not None:
        tokens[tokens == end] = (end + 1) % vocabulary
    units = (hashed(bits, _LOGPROB_WORD) >> np.uint64(40)).astype(np.float32)
    return tokens, -(units + np.float32(1.0)) / np.float32(1 << 23)

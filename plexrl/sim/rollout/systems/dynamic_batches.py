"""Dynamic-batch pipelining: training of what has been streamed so far (StreamRL §4.1). Pure.

When the trainer is idle and what waits is enough to fill its GPUs, it trains all that waits as one
mini-batch. Gradients add up, and parameters change when the whole batch is trained.
"""

FILL_TOKENS = 2048
"""Tokens for each GPU that fill the trainer; the paper names no number. Eight GPUs of one replica
then compute on 16 384 tokens at a time."""


class DynamicBatches:
    """The mini-batches of one batch."""

    def __init__(self, tokens_per_s: float, fill_tokens: float, now: float) -> None:
        """`fill_tokens`: least tokens of a mini-batch; the trainer is idle from `now` on."""
        self._tokens_per_s = tokens_per_s
        self._fill_tokens = fill_tokens
        self._waiting = 0.0
        self._busy_until_s = now

    def complete(self, tokens: int, now: float) -> None:
        """Samples of so many tokens are complete."""
        self._advance(now)
        self._waiting += tokens
        if self._busy_until_s <= now and self._waiting >= self._fill_tokens:
            self._begin(now)

    def left_tokens(self, now: float) -> float:
        """Tokens that are still to be trained; what is less than a mini-batch is one, too."""
        self._advance(now)
        busy_s = max(0.0, self._busy_until_s - now)
        return self._waiting + busy_s * self._tokens_per_s

    def _advance(self, now: float) -> None:
        while self._busy_until_s <= now and self._waiting >= max(self._fill_tokens, 1.0):
            self._begin(self._busy_until_s)

    def _begin(self, at_s: float) -> None:
        self._busy_until_s = at_s + self._waiting / self._tokens_per_s
        self._waiting = 0.0

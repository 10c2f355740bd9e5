"""Batches of rows with different lengths, packed end to end."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from plexrl.client.data.batch_rows import (
    check_count,
    pack,
    pack_tokens,
    rows_of,
    token_row,
    value_row,
)
from plexrl.errors import BatchShapeError
from plexrl.wire.parameter_checks import short

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from plexrl.client.data.results import CapturedSegment, Sample
    from plexrl.wire.tensors import Arrays

    Values = Sequence[float] | npt.NDArray[np.floating[Any] | np.integer[Any] | np.bool_]
    """One row's values."""


class Batch:
    """Rows of tokens with per-token values.

    Rows may have different lengths; they are neither padded nor cut. Entry t of a per-token row
    refers to token t as predicted from the tokens before it, so entry 0 never counts. All values
    are sent as float32. The losses read these values, by name:

    - `mask`: the weight of a token in the loss, mostly 0 or 1; 0 drops it (a prompt's tokens).
    - `logprobs`: of each token under the policy that drew it, in nats (`Sample.logprobs`).
    - `advantages`: how much to raise a token's likelihood; the caller centres and scales them.
    - `prox_logprobs`: of each token under the train deployment before the first step with this
      batch, in nats, for `decoupled_ppo`.
    - `ref_logprobs`: of each token under the reference policy, in nats, for a loss with a `kl_coef`
      above 0.
    - `weights`: minus the gradient of the controller's own loss by each token's logprob.
    - `returns` and `values`: of a critic, for `losses.value()`: what its value is to become, and
      what it was before the first step with this batch.

    The SDK checks shapes; the router checks the rest.
    """

    def __init__(
        self,
        tokens: Iterable[Sequence[int]],
        per_token: "Mapping[str, Iterable[Values]] | None" = None,
    ) -> None:
        """`tokens` are the rows, lists of token ids; `per_token` holds, for each name, one row of
        values for each row of tokens, of the same length.

        Raises:
            BatchShapeError: a row is not a list of whole numbers, or a row of values has another
                length than its row of tokens.
            TokenRangeError: a token does not fit into 32 bits.
        """
        import numpy as np

        rows = [token_row(row, index) for index, row in enumerate(rows_of("tokens", tokens))]
        self._lengths = np.array([len(row) for row in rows], dtype=np.int32)
        self._tokens = pack_tokens(rows)
        self._per_token: dict[str, npt.NDArray[np.float32]] = {}
        self._sampled_step: int | None = None
        if not isinstance(per_token, Mapping | None):
            raise BatchShapeError(
                f"per_token is {short(per_token)}: give a dict of rows by name, as {{'mask': …}}"
            )
        for name, values in (per_token or {}).items():
            self._per_token[name] = self._pack(name, values)

    @classmethod
    def from_completions(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        mask: "Sequence[Values] | None" = None,
        logprobs: "Sequence[Values] | None" = None,
        advantages: "Sequence[Values] | None" = None,
        ref_logprobs: "Sequence[Values] | None" = None,
        weights: "Sequence[Values] | None" = None,
    ) -> "Batch":
        """Rows of prompt and completion: `prompts[i]` followed by `completions[i]`, token ids.

        `mask`, `logprobs`, `advantages`, `ref_logprobs` and `weights` are per-token values of the
        completions, `[completions][tokens]`; on the prompts' tokens they are 0. Without a `mask`
        the mask is 1 on the completions' tokens; other absent values are left out of the batch.

        Raises:
            BatchShapeError: a row is invalid, there is not one completion for each prompt, or
                values have another length.
        """
        import numpy as np

        before = [token_row(row, at) for at, row in enumerate(rows_of("prompts", prompts))]
        after = [token_row(row, at) for at, row in enumerate(rows_of("completions", completions))]
        check_count("completions", len(after), "prompts", len(before))
        tokens = [pack_tokens(parts) for parts in zip(before, after, strict=True)]
        given = {
            "mask": [np.ones(len(row)) for row in after] if mask is None else mask,
            "logprobs": logprobs,
            "advantages": advantages,
            "ref_logprobs": ref_logprobs,
            "weights": weights,
        }
        values: dict[str, list[Any]] = {}
        for name, per_token in given.items():
            if per_token is None:
                continue
            rows = [value_row(name, row, at) for at, row in enumerate(rows_of(name, per_token))]
            check_count(name, len(rows), "completions", len(after))
            values[name] = rows
            for index, (row, completion) in enumerate(zip(rows, after, strict=True)):
                if len(row) != len(completion):
                    raise BatchShapeError(
                        f"{name}: row {index} has {len(row)} values for {len(completion)} tokens "
                        "of its completion: give one for each",
                        array=name,
                        row=index,
                    )
            values[name] = rows
        shifted = {
            name: [
                np.concatenate([np.zeros(len(prompt), dtype=np.float32), row])
                for prompt, row in zip(before, rows, strict=True)
            ]
            for name, rows in values.items()
        }
        return cls(tokens, shifted)

    @classmethod
    def from_samples(
        cls,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[Sequence["Sample"]],
        advantages: "Sequence[Values] | npt.NDArray[np.floating[Any]]",
        *,
        keep: "Sequence[bool] | npt.NDArray[np.bool_] | None" = None,
    ) -> "Batch":
        """A batch for a policy loss: tokens, mask, logprobs and advantages of generated samples.

        `prompts` are those given to `generate`, and `samples` are its result's, `[prompts][n]`.
        `advantages` are floats, also `[prompts][n]` (an array or lists): one for each sample, which
        all of its tokens get. A row of the batch is a prompt and one of its samples, prompt by
        prompt. `keep`, `[prompts]`, drops the samples of prompts for which it is False (such as
        those with equal rewards).

        Raises:
            BatchShapeError: the counts differ.
        """
        import numpy as np

        from plexrl.client.data.results import Sample

        prompts = rows_of("prompts", prompts)
        groups = [rows_of("samples of a prompt", group) for group in rows_of("samples", samples)]
        scores = [value_row("advantages", row, at) for at, row in enumerate(_by_prompt(advantages))]
        check_count("samples", len(groups), "prompts", len(prompts))
        check_count("advantages", len(scores), "prompts", len(prompts))
        kept = [True] * len(groups) if keep is None else rows_of("keep", keep)
        check_count("entries of keep", len(kept), "prompts", len(prompts))
        flat_prompts: list[Sequence[int]] = []
        completions: list[Sequence[int]] = []
        logprobs: list[Values] = []
        spread: list[Any] = []
        drawn: list[Sample] = []
        for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            check_count(f"advantages of prompt {index}", len(scores[index]), "samples", len(group))
            if not kept[index]:
                continue
            for sample, advantage in zip(group, scores[index], strict=True):
                if not isinstance(sample, Sample):
                    raise BatchShapeError(
                        f"samples: {short(sample)} of prompt {index} is not a Sample: give "
                        "generate(…).result().samples, or use Batch.from_completions"
                    )
                drawn.append(sample)
                flat_prompts.append(prompt)
                completions.append(sample.tokens)
                logprobs.append(sample.logprobs)
                spread.append(np.full(len(sample.tokens), advantage, dtype=np.float32))
        batch = cls.from_completions(
            flat_prompts, completions, logprobs=logprobs, advantages=spread
        )
        batch._sampled_step = _oldest_step(drawn)
        return batch

    @classmethod
    def from_segments(
        cls, segments: "Sequence[CapturedSegment]", advantages: "Values | None" = None
    ) -> "Batch":
        """A batch of captured `segments`, or of those of `environments`: their tokens, the mask of
        what the model drew, and its logprobs. With `advantages`, one number for each segment, all
        drawn tokens of a segment get it. Segments that share turns, such as those of a call with
        `n` above 1 and what follows it, each train the shared turns.

        Raises:
            BatchShapeError: there is not one advantage for each segment.
        """
        rows = rows_of("segments", segments)
        values: dict[str, list[Any]] = {
            "mask": [segment.mask for segment in rows],
            "logprobs": [segment.logprobs for segment in rows],
        }
        if advantages is not None:
            given = value_row("advantages", advantages, 0)
            check_count("advantages", len(given), "segments", len(rows))
            values["advantages"] = [
                [float(advantage) * drawn for drawn in segment.mask]
                for segment, advantage in zip(rows, given, strict=True)
            ]
        batch = cls([segment.tokens for segment in rows], values)
        batch._sampled_step = _oldest_step(rows)
        return batch

    def with_values(self, name: str, rows: "Sequence[Values]") -> "Batch":
        """A copy of this batch with further per-token values called `name` (`ref_logprobs`,
        `weights`, …), which replace values of that name. `rows` has one entry for each row of the
        batch, as long as that row, prompt included; the `logprobs` of a `forward` result have this
        shape.

        Raises:
            BatchShapeError: a row has another length than its tokens.
        """
        other = object.__new__(Batch)
        other._lengths, other._tokens = self._lengths, self._tokens
        other._sampled_step = self._sampled_step
        other._per_token = {**self._per_token, name: self._pack(name, rows)}
        return other

    def arrays(self, names: Sequence[str] | None = None) -> "Arrays":
        """The packed arrays: `tokens` int32 `[all tokens]`, the rows end to end, `lengths` int32
        `[rows]`, and per-token values float32 `[all tokens]`; with `names` only these values.

        Raises:
            BatchShapeError: the batch lacks one of `names`.
        """
        wanted = list(self._per_token) if names is None else names
        missing = sorted(set(wanted) - set(self._per_token))
        if missing:
            raise BatchShapeError(
                f"the loss needs {', '.join(missing)}; the batch has only "
                f"{', '.join(sorted(self._per_token)) or 'tokens'}: add them by `with_values`"
            )
        chosen = {name: self._per_token[name] for name in wanted}
        return {"tokens": self._tokens, "lengths": self._lengths, **chosen}

    @property
    def sampled_step(self) -> int | None:
        """Optimizer steps in the oldest weights that drew the rows; None: the batch was not made by
        `from_samples` or `from_segments`, or a row does not say it. The cluster compares sampler
        and trainer by it (`health` of `Job.status`)."""
        return self._sampled_step

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [int(length) for length in self._lengths]

    def __len__(self) -> int:
        return len(self._lengths)

    def __repr__(self) -> str:
        lengths = self._lengths
        spread = f", lengths={lengths.min()}..{lengths.max()}" if len(lengths) else ""
        names = ", ".join(self._per_token)
        return f"Batch(rows={len(lengths)}, tokens={len(self._tokens)}{spread}, values=[{names}])"

    def _pack(self, name: str, rows: "Iterable[Values]") -> "npt.NDArray[np.float32]":
        import numpy as np

        if not isinstance(name, str):
            raise BatchShapeError(f"per-token values are named {short(name)}: give a string")
        found = [value_row(name, row, index) for index, row in enumerate(rows_of(name, rows))]
        self._check(name, [len(row) for row in found])
        packed: npt.NDArray[np.float32] = pack(found, np.float32)
        return packed

    def _check(self, name: str, lengths: Sequence[int]) -> None:
        check_count(name, len(lengths), "token rows", len(self._lengths))
        for row, (length, tokens) in enumerate(zip(lengths, self._lengths, strict=True)):
            if length != tokens:
                raise BatchShapeError(
                    f"{name}: row {row} has {length} values for {tokens} tokens: give one for each "
                    "token, 0 for unused ones",
                    array=name,
                    row=row,
                )


def _oldest_step(rows: "Sequence[Sample | CapturedSegment]") -> int | None:
    steps = [min((span.trainer_step for span in row.weights), default=None) for row in rows]
    known = [step for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None


def _by_prompt(advantages: Any) -> list[Any]:
    """A row of advantages for each prompt."""
    rows = rows_of("advantages", advantages)
    if any(isinstance(row, Real) for row in rows):
        raise BatchShapeError(
            "advantages has one number for each prompt: give one for each sample, "
            "[prompts][samples]",
            array="advantages",
        )
    return rows

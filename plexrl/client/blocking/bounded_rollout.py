"""Asynchronous rollouts: generation runs ahead of training, within a staleness bound."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from plexrl.client.blocking.deployment_kinds import TrainDeployment
from plexrl.client.calls.transport import Call, Transport
from plexrl.client.data.batch_rows import split_rows
from plexrl.client.data.results import Sample, WeightsSpan
from plexrl.client.display.handle_repr import handle_repr
from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.rewards.scheduler import Graded, RewardScheduler
from plexrl.wire.messages.rollout_views import RolloutStatus

if TYPE_CHECKING:
    from plexrl.client.futures.futures import Future
    from plexrl.rewards.grade import Grade
    from plexrl.wire.tensors import Arrays

LOG = logging.getLogger(__name__)

WAIT_S = 2.0
"""How long the cluster waits for news before it answers; bounds the time to stop, too."""
REWARD_TIMEOUT_S = 300.0
"""Default time limit of one call of a plain reward function."""
HELD_BACK_S = 0.02
"""Interval at which it is asked whether the trainer has done its parts, while one waits."""
PARTS_AHEAD = 2
"""Parts that the trainer has at a time: one that it works on, and one so that it does not wait for
the controller."""
PROMPT_TOKENS_MAX = 1 << 20
"""About the most tokens of prompts in one request."""
GRADING_WAIT_S = 0.1
"""How long the feeder waits for a reward before it asks the cluster for more samples."""
RewardFunction = Callable[[list[int], Sample], "Grade | float | None"]
"""Maps a prompt and one of its samples to its reward. None: the sample shall have none, and the
prompt is dropped with all of its samples."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The samples of one training step, as `generate` would return them, with their rewards."""

    version: int
    """Number of the batch: the model has trained as many batches before."""
    prompts: list[list[int]]
    """Token ids, in the order in which the prompts were given."""
    prompt_numbers: list[int]
    """Position of each prompt among those that were given to this rollout, from 0."""
    samples: list[list[Sample]]
    """`[prompts][samples]`. `Sample.weights` has versions of the rollout: one for each batch."""
    rewards: list[list[float]]
    """`[prompts][samples]`."""
    sample_versions: list[list[int]]
    """`[prompts][samples]`: the oldest version that may have drawn a token of the sample. It is at
    least `version` - staleness."""
    is_last: bool = True
    """False: a part of a batch, of which there are more."""


class BoundedRollout:
    """Several instances of a model that generate ahead of the training, within a bound on the
    staleness of what is trained."""

    def __init__(
        self, transport: Transport, job: str, order: Mapping[str, Any], source: TrainDeployment
    ) -> None:
        """Creates the rollout, or finds the existing one, and waits until all instances have the
        weights of `source`."""
        self._transport = transport
        self._order = order
        self._source = source
        self.name: str = order["name"]
        base = f"/v1/jobs/{quote(job)}/rollouts"
        self._path = f"{base}/{quote(self.name)}"
        while not self._ask(base, order).json()["joined"]:
            LOG.info("rollout %s: instances are placed and load the weights", self.name)

    def __repr__(self) -> str:
        shown = (
            "staleness",
            "over_launch_prompts",
            "over_launch_responses",
            "fixed_over_launch",
            "scale_down",
            "length_aware",
        )
        return handle_repr(self, self.name, **{each: self._order[each] for each in shown})

    def status(self) -> RolloutStatus:
        """Versions, staleness of the latest batches, samples and tokens generated, trained and
        dropped, and the load of each instance."""
        view: RolloutStatus = self._transport.ask("GET", self._path)
        return view

    def batches(
        self,
        prompts: Iterable[Sequence[int]],
        reward: RewardFunction | Graded[Sample],
        *,
        steps: int,
        reward_timeout_s: float | None = REWARD_TIMEOUT_S,
    ) -> Iterator[RolloutBatch]:
        """Yield the batches up to number `steps` - 1 on which the model was not trained yet.

        Train on a batch, with one `optim_step`, before taking the next one. `prompts` are token
        ids, from the first one of the rollout on, also when a controller continues another's
        work; there are more than `steps` batches need, because some may be dropped.

        `reward` runs in a thread while the model is trained; the loop ends with an error that it
        raises, or with `DeadlineExceededError`, which names the prompt, if one call takes longer
        than `reward_timeout_s` seconds (300; None: without a bound). `rewards.Graded` grades
        several samples at a time, chooses what an error means, and has a `timeout_s` of its own.

        Raises:
            RolloutFailedError: no instance is left, or too many prompts were dropped one after
                another. Create the rollout again, with the same arguments, to continue.
            InvalidRequestError: there are too few prompts.
        """
        return self._started(prompts, reward, steps, reward_timeout_s)

    def parts(
        self,
        prompts: Iterable[Sequence[int]],
        reward: RewardFunction | Graded[Sample],
        *,
        steps: int,
        tokens_min: int = 0,
        prompts_min: int = 1,
        reward_timeout_s: float | None = REWARD_TIMEOUT_S,
    ) -> Iterator[RolloutBatch]:
        """Yield each batch of `batches`, whose arguments `prompts`, `reward`, `steps` and
        `reward_timeout_s` are, in parts (StreamRL §4.1). `is_last` tells that a part completes its
        batch.

        A part comes as soon as the prompts whose samples all have rewards have `tokens_min` tokens,
        counting each sample with its prompt, and `prompts_min` prompts; the last one may have
        fewer. While the trainer still has the two parts before it to do, a part waits, and grows by
        what is complete then: parts are as large as the trainer is slow, and it never waits for one
        that it could have.

        Run `forward_backward` with a loss that is a sum on each part, and after the last one an
        `optim_step` with `divide_by`: that is the step by the whole batch.

        Raises as `batches`, and:
            ConflictError: the policy was changed, and excludes prompts of the earlier parts.
        """
        size = PartSize(tokens_min, prompts_min)
        return self._started(prompts, reward, steps, reward_timeout_s, size)

    def _started(
        self,
        prompts: Iterable[Sequence[int]],
        reward: RewardFunction | Graded[Sample],
        steps: int,
        reward_timeout_s: float | None,
        size: "PartSize | None" = None,
    ) -> Generator[RolloutBatch]:
        """As `batches`, or as `parts` with a `size`; closing it ends the thread."""
        check_numbers("rollout", {"steps": steps, "reward_timeout_s": reward_timeout_s})
        if not isinstance(reward, Graded):
            reward = Graded(reward, on_failure="raise", at_once=1, timeout_s=reward_timeout_s)
        batches = steps - int(self._order["first_batch"])
        feeder = _Feeder(self, iter(prompts), reward, batches * int(self._order["prompts"]))
        feeder.start()
        try:
            for version in range(self._untrained(), steps):
                step = self._trainer_step()
                if size is None:
                    yield self._batch(version, step, feeder)
                else:
                    yield from self._parts(version, step, feeder, size)
        finally:
            feeder.stop()

    def _untrained(self) -> int:
        """Number of the first batch on which the model was not trained."""
        found = self.status()
        latest = found["latest_batch"]
        # A controller that ended may have had the batch, and made no step with it.
        if latest is None or latest["trainer_step"] != self._trainer_step():
            return found["next_batch"]
        return latest["version"]

    def _trainer_step(self) -> int:
        """The trainer's steps, including those that were submitted before."""
        self._source.barrier().result()
        return int(self._source.status()["trainer_step"])

    def _batch(self, version: int, trainer_step: int, feeder: "_Feeder") -> RolloutBatch:
        rows: list[_TrainedRow] = []
        while len(rows) < self._batch_rows:
            # A large batch comes in several answers.
            rows += self._complete(version, trainer_step, feeder, {"first": len(rows)})
        return _as_batch(version, rows, int(self._order["samples"]))

    def _parts(
        self, version: int, trainer_step: int, feeder: "_Feeder", size: "PartSize"
    ) -> Iterator[RolloutBatch]:
        samples, seen = int(self._order["samples"]), list[int]()
        held: dict[int, list[_TrainedRow]] = {}
        given: deque[Future[dict[str, object]]] = deque()
        """The end of each part that the trainer has not done."""
        while len(seen) < self._batch_rows or held:
            whole = [held[each] for each in sorted(held) if len(held[each]) == samples]
            is_last = len(seen) == self._batch_rows
            is_due = is_last or size.is_reached(whole)
            while given and given[0].done():
                given.popleft()
            if is_due and (is_last or len(given) < PARTS_AHEAD):
                yield _as_batch(version, [*chain(*whole)], samples, is_last=is_last)
                held = {each: rows for each, rows in held.items() if len(rows) < samples}
                # Behind what the controller has submitted for the part.
                given.append(self._source.barrier())
                continue
            wait_s = HELD_BACK_S if is_due else WAIT_S
            wanted = {"seen": seen}
            for row in self._complete(version, trainer_step, feeder, wanted, wait_s):
                held.setdefault(row.row.group, []).append(row)
                seen.append(row.row.trajectory)

    @property
    def _batch_rows(self) -> int:
        return int(self._order["prompts"]) * int(self._order["samples"])

    def _complete(
        self,
        version: int,
        trainer_step: int,
        feeder: "_Feeder",
        wanted: Mapping[str, Any],
        wait_s: float = WAIT_S,
    ) -> "list[_TrainedRow]":
        """Samples of a batch that the cluster has for it now; none: it has no new ones yet."""
        from plexrl.wire.tensors import decode_body

        feeder.check()
        body = {"trainer_step": trainer_step, **wanted}
        response = self._ask(f"{self._path}/batches/{version}", body, wait_s)
        if response.status_code == 202:
            return []
        answer, arrays = decode_body(bytearray(response.content))
        rows = _decode_samples(answer, arrays)
        found = zip(rows, answer["rewards"], answer["versions"], strict=True)
        return [_TrainedRow(*each) for each in found]

    def _exchange(self, body: Mapping[str, Any], wait_s: float) -> "tuple[dict[str, Any], Arrays]":
        """Give prompts and rewards, and take samples; see the HTTP API."""
        from plexrl.wire.tensors import decode_body

        return decode_body(bytearray(self._ask(f"{self._path}/exchange", body, wait_s).content))

    def _ask(self, path: str, body: Mapping[str, Any], wait_s: float = WAIT_S) -> Any:
        call = Call(method="POST", path=path, query={"wait_s": wait_s}, json=body)
        return self._transport.request(call)


class _Feeder(threading.Thread):
    """Gives prompts, and computes rewards, while the controller trains."""

    def __init__(
        self,
        rollout: BoundedRollout,
        prompts: Iterator[Sequence[int]],
        reward: Graded[Sample],
        needed: int,
    ) -> None:
        super().__init__(name=f"rollout-{rollout.name}", daemon=True)
        self._rollout = rollout
        self._prompts = prompts
        self._scheduler = RewardScheduler(reward)
        self._needed = needed
        """Prompts that are trained in the end."""
        self._stopped = threading.Event()
        self._error: Exception | None = None

    def check(self) -> None:
        """Raises what has ended the thread."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread, and the grading."""
        self._stopped.set()
        self._scheduler.stop()
        self.join()

    def run(self) -> None:
        try:
            self._feed()
        except Exception as error:
            # The controller's thread raises it.
            self._error = error

    def _feed(self) -> None:
        given = self._rollout.status()["next_group"]
        for _ in islice(self._prompts, given):
            pass
        rewards: list[tuple[Any, ...]] = []
        """Trajectory, the event of its end, reward, and why it lacks one."""
        rows: list[list[int]] = []
        is_all = False
        cursor, dropped = 0, 0
        while not self._stopped.is_set():
            body = {
                "first": given,
                "prompts": rows,
                "ended": is_all,
                "rewards": rewards,
                "after": cursor,
            }
            # New samples and new rewards are waited for in turn while there may be both.
            wait_s = 0.0 if self._scheduler.pending else WAIT_S
            answer, arrays = self._rollout._exchange(body, wait_s)
            if answer["dropped"] > dropped:
                dropped = answer["dropped"]
                LOG.warning(
                    "rollout %s dropped %d prompts so far: %s",
                    *(self._rollout.name, dropped, answer["dropped_reason"]),
                )
            # A round may have ended meanwhile, and the next one not want all of them.
            left = rows[answer["next_group"] - given :]
            cursor, given = answer["cursor"], answer["next_group"]
            wanted = answer["groups_wanted"]
            rows, is_all = self._next_prompts(wanted, left)
            if is_all and given + len(rows) - dropped < self._needed:
                raise InvalidRequestError(
                    f"the prompts ended after {given + len(rows)}, {dropped} were dropped, and the "
                    f"steps need {self._needed}: give more prompts"
                )
            if wanted and not rows:
                # All have been given: the cluster would answer at once.
                self._stopped.wait(WAIT_S / 10)
            found = _decode_samples(answer, arrays)
            for row, event in zip(found, answer["events"], strict=True):
                # A prompt that is queued has its trajectories generated again.
                self._scheduler.submit((row.trajectory, event), row.prompt, row.sample)
            rewards = []
            for each in self._scheduler.finished(GRADING_WAIT_S):
                assert isinstance(each.key, tuple), "the keys are those of `submit` above"
                rewards.append((*each.key, each.reward, each.failure or ""))

    def _next_prompts(self, count: int, left: Sequence[list[int]]) -> tuple[list[list[int]], bool]:
        """Up to `count` prompts, as many as fit into a request, and whether there are no more:
        `left` first, which were not taken, and then new ones."""
        rows = list(left)
        tokens = sum(map(len, rows))
        while len(rows) < count and tokens < PROMPT_TOKENS_MAX:
            row = next(self._prompts, None)
            if row is None:
                return rows, True
            rows.append(list(map(int, row)))
            tokens += len(rows[-1])
        return rows, False


@dataclass(frozen=True, slots=True)
class PartSize:
    """The least size of a part, unless it is the last one of its batch.

    Raises:
        InvalidRequestError: a number is negative, or no prompt would be enough.
    """

    tokens_min: int
    """Tokens of prompts and samples; each sample counts with its prompt, as in training."""
    prompts_min: int

    def __post_init__(self) -> None:
        for name in ("tokens_min", "prompts_min"):
            check_numbers("rollout", {name: getattr(self, name)})

    def is_reached(self, whole: "Sequence[Sequence[_TrainedRow]]") -> bool:
        """Whether prompts with these samples are enough."""
        rows = [each.row for each in chain(*whole)]
        tokens = sum(len(row.prompt) + len(row.sample.tokens) for row in rows)
        return len(whole) >= self.prompts_min and tokens >= self.tokens_min


@dataclass(frozen=True, slots=True)
class _Row:
    trajectory: int
    group: int
    """Number of the prompt."""
    prompt: list[int]
    sample: Sample


@dataclass(frozen=True, slots=True)
class _TrainedRow:
    row: _Row
    reward: float
    version: int


def _decode_samples(answer: Mapping[str, Any], arrays: "Arrays") -> list[_Row]:
    prompts = split_rows(arrays["prompts"], arrays["prompt_lengths"].tolist())
    lengths = arrays["lengths"].tolist()
    tokens, logprobs = (split_rows(arrays[name], lengths) for name in ("tokens", "logprobs"))
    drawn_by = None
    if "sampling_logprobs" in arrays:
        drawn_by = split_rows(arrays["sampling_logprobs"], lengths)
    found = []
    ids = zip(arrays["trajectories"].tolist(), arrays["groups"].tolist(), strict=True)
    for index, (trajectory, group) in enumerate(ids):
        spans, start = [], 0
        for count, version, step in answer["segments"][index]:
            spans.append(WeightsSpan(start, version, step))
            start += count
        sample = Sample(
            tokens[index].tolist(),
            logprobs[index],
            answer["finish"][index],
            tuple(spans),
            None if drawn_by is None else drawn_by[index],
        )
        found.append(_Row(trajectory, group, prompts[index].tolist(), sample))
    return found


def _as_batch(
    version: int, rows: "list[_TrainedRow]", samples: int, *, is_last: bool = True
) -> RolloutBatch:
    groups = [rows[at : at + samples] for at in range(0, len(rows), samples)]
    return RolloutBatch(
        version=version,
        prompts=[group[0].row.prompt for group in groups],
        prompt_numbers=[group[0].row.group for group in groups],
        samples=[[each.row.sample for each in group] for group in groups],
        rewards=[[each.reward for each in group] for group in groups],
        sample_versions=[[each.version for each in group] for group in groups],
        is_last=is_last,
    )

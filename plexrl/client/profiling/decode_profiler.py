"""Measures the profile of a rollout deployment that switches its tensor-parallel groups (PAT §4.2).

Each load is a plain `generate` of random prompts. It is submitted while the engines are paused, so
that the groups have their size before the first token: an engine begins in its smallest groups.
"""

import json
import logging
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from plexrl.client.calls.transport import Transport, deployment_path
from plexrl.client.data.decode_profile import (
    DecodeProfile,
    ProfilePoint,
    ProfileSubject,
    profile_from_json,
)
from plexrl.client.profiling.profile_grid import STEPS, EngineSize, GridPoint, grid
from plexrl.errors import ConflictError, InvalidRequestError, StorageError
from plexrl.limits import check_numbers
from plexrl.process.folders.durable_files import write_durably
from plexrl.wire.messages.workers import EngineLoadView
from plexrl.wire.operations import SamplingParams

if TYPE_CHECKING:
    import os

    from plexrl.client.blocking.deployment_kinds import RolloutDeployment
    from plexrl.client.futures.generations import GenerateFuture
    from plexrl.wire.messages.views import EngineLoads

LOG = logging.getLogger(__name__)


POLL_S = 0.02
ROWS_TIMEOUT_S = 60.0
"""A submitted generation has arrived in the engines within this time."""
REPLY_TIMEOUT_S = 60.0
"""An engine replies between two passes, which take less than this."""
SWITCHES = 3
"""Switches of which the median counts."""


class DecodeProfiler:
    """One call of `profile_decoding`."""

    def __init__(self, rollout: "RolloutDeployment", transport: Transport, path: Path) -> None:
        """`path`: the file with the profile, which may have points already."""
        self._rollout = rollout
        self._transport = transport
        self._path = path
        self._rng = random.Random(0)
        self._ranks = self._vocabulary = 1

    def run(self, minutes: float) -> DecodeProfile:
        """Measure for so many minutes at most, about. Raises as `profile_decoding`."""
        check_numbers("profile", {"minutes": minutes})
        spec = json.loads(self._rollout.status()["spec_json"])
        if not spec.get("tp_sizes"):
            raise InvalidRequestError(
                f"{self._rollout.deployment!r} has one size of tensor-parallel groups, so there is "
                "nothing to choose from: create it with tp_sizes"
            )
        # Its workers are started then, and the first passes are over.
        self._rollout.generate([[0]], sampling=SamplingParams(max_tokens=8)).result()
        engine = self._engines()[0]
        subject = ProfileSubject(**engine["subject"], tp_sizes=tuple(spec["tp_sizes"]))
        profile = DecodeProfile(subject=subject)
        if self._path.exists():
            profile = read_profile(self._path)
            profile.subject.check_serves(subject)
        self._ranks, self._vocabulary = subject.tp_sizes[-1], engine["vocab_size"]
        size = EngineSize(
            tp_sizes=subject.tp_sizes,
            samples_max=spec["max_concurrent_samples"],
            sequence_tokens_max=spec["max_sequence_tokens"],
            kv_tokens=engine["blocks"] * engine["block_tokens"],
            block_tokens=engine["block_tokens"],
        )
        try:
            return self._fill(profile, grid(size), time.monotonic() + 60 * minutes)
        finally:
            self._rollout.resume()

    def _fill(self, profile: DecodeProfile, loads: list[GridPoint], end: float) -> DecodeProfile:
        known = {(point.tp, point.rows, point.prompt_tokens) for point in profile.points}
        if not profile.switch_s:
            profile = self._with_switches(profile, loads)
            self._write(profile)
        for number, load in enumerate(loads, 1):
            if (load.tp, load.rows, load.prompt_tokens) in known:
                continue
            if time.monotonic() >= end:
                LOG.info(
                    "profile: the time is over, with %d of %d loads measured; a further call goes "
                    "on with %s",
                    *(len(profile.points), len(loads), self._path),
                )
                break
            point = self._measured(load)
            if point is None:
                LOG.warning("profile: %s did not run as a whole, and is left out", load)
                continue
            profile = replace(profile, points=(*profile.points, point))
            self._write(profile)
            LOG.info(
                "profile %d/%d: tp %d, %d rows of %d tokens: %.2f ms a step",
                *(number, len(loads), load.tp, load.rows, load.prompt_tokens),
                1e3 * point.step_s,
            )
        return profile

    def _measured(self, load: GridPoint) -> ProfilePoint | None:
        """The times of a load; None: its rows did not run at the same time."""
        future = self._submit(load)
        before = self._rollout.switch_tp(load.tp, kv="recompute")[0]
        last = max((step[0] for step in self._engines()[0]["steps"]), default=0)
        self._rollout.resume()
        future.result()
        after = self._engines()[0]
        # Of a restarted engine, whose steps are numbered anew, nothing is found.
        steps = [
            (kv_tokens, seconds + other_s)
            for number, rows, kv_tokens, seconds, tp, other_s in after["steps"]
            if number > last and (rows, tp) == (load.rows, load.tp)
        ]
        prefill_s = after["prefill_s"] - before["prefill_s"]
        if not steps or prefill_s <= 0:
            return None
        return ProfilePoint(
            tp=load.tp,
            rows=load.rows,
            prompt_tokens=load.prompt_tokens,
            kv_tokens=sum(kv_tokens for kv_tokens, _ in steps) / len(steps),
            step_s=median(seconds for _, seconds in steps),
            prefill_s=prefill_s,
        )

    def _with_switches(self, profile: DecodeProfile, loads: list[GridPoint]) -> DecodeProfile:
        """The cost of switches, of the least KV cache and of the most."""
        sizes = profile.subject.tp_sizes
        smallest = [load for load in loads if load.tp == sizes[0]]
        least = min(smallest, key=lambda load: load.rows * load.prompt_tokens)
        most = max(smallest, key=lambda load: load.rows * load.prompt_tokens)
        fixed_s, few = self._switch(least, sizes)
        seconds, many = self._switch(most, sizes)
        LOG.info("profile: a switch takes %.1f to %.1f ms", 1e3 * fixed_s, 1e3 * seconds)
        if seconds <= fixed_s or many <= few:
            return replace(profile, switch_s=max(fixed_s, 1e-6))
        bandwidth = (many - few) / sizes[-1] / (seconds - fixed_s)
        return replace(profile, switch_s=max(fixed_s, 1e-6), kv_bytes_per_s=bandwidth)

    def _switch(self, load: GridPoint, sizes: tuple[int, ...]) -> tuple[float, int]:
        """Seconds of a switch from the smallest to the largest groups while the rows of a load run,
        and the bytes that all ranks send."""
        long = replace(load, draws=load.draws + STEPS)
        future = self._submit(long)
        self._rollout.resume()
        while any(row[2] <= load.prompt_tokens for row in self._engines()[0]["rows"]):
            time.sleep(POLL_S)
        self._rollout.pause()
        found = []
        for _ in range(SWITCHES):
            found.append(self._rollout.switch_tp(sizes[-1])[0])
            self._rollout.switch_tp(sizes[0])
        self._rollout.resume()
        future.result()
        seconds = median(each["tp_switch_s"] for each in found)
        return seconds, found[0]["kv_bytes_moved"]

    def _submit(self, load: GridPoint) -> "GenerateFuture":
        """The rows of a load wait in paused engines."""
        engines = self._rollout.pause()
        groups = self._ranks // load.tp * len(engines)
        prompts = [
            [self._rng.randrange(self._vocabulary) for _ in range(load.prompt_tokens)]
            for _ in range(load.rows * groups)
        ]
        sampling = SamplingParams(max_tokens=load.draws, ignore_eos=True, seed=0)
        future = self._rollout.generate(prompts, sampling=sampling)
        end = time.monotonic() + ROWS_TIMEOUT_S
        while sum(len(engine["rows"]) for engine in self._engines()) < len(prompts):
            if time.monotonic() > end:
                raise ConflictError(
                    f"the prompts did not arrive in the engines of {self._rollout.deployment!r} "
                    f"within {ROWS_TIMEOUT_S:.0f} s: see `plexrl explain`"
                )
            time.sleep(POLL_S)
        return future

    def _engines(self) -> list[EngineLoadView]:
        """The load of the engines."""
        path = f"{deployment_path(self._rollout.deployment)}/engines"
        end = time.monotonic() + REPLY_TIMEOUT_S
        while True:
            # An engine in the middle of a long pass is left out.
            found: EngineLoads = self._transport.ask("GET", path)
            if found["engines"]:
                return found["engines"]
            if time.monotonic() > end:
                raise ConflictError(
                    f"the engines of {self._rollout.deployment!r} do not reply: see "
                    "`plexrl explain`"
                )
            time.sleep(POLL_S)

    def _write(self, profile: DecodeProfile) -> None:
        try:
            write_durably(self._path, profile.to_json().encode())
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error}") from error


def read_profile(path: "str | os.PathLike[str]") -> DecodeProfile:
    """The profile in a file that `rollout.profile_decoding` wrote.

    Raises:
        InvalidRequestError: the file cannot be read, or has something else.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"the profile {path} cannot be read: {error}") from error
    return profile_from_json(text)

"""Samples of jobs, as their controllers log them: one file for each step.

A further call for a step replaces its samples. The newest `STEPS_MAX` steps of a job are kept, and
of these as many of the newest as its bound on bytes allows.
"""

import time
from collections.abc import Sequence

import msgspec

from plexrl.errors import NotFoundError
from plexrl.router.job_files.record_store import JobKey, RecordStore
from plexrl.wire.messages.run_views import (
    CHARACTERS_MAX,
    SAMPLES_MAX,
    STEPS_MAX,
    SampleView,
    StepSamples,
)

FOLDER = "samples"
ZERO = 1 << 63
"""Added to a step in a file's name, so that names are in the order of steps."""


class SampleLog:
    """Samples of all jobs. The methods block, and raise as `RecordStore`."""

    def __init__(self, store: RecordStore, *, job_bytes_max: int) -> None:
        self._store = store
        self._job_bytes_max = job_bytes_max

    def write(self, job: JobKey, step: int, samples: Sequence[SampleView], total: int) -> None:
        """Keep the samples of a step, and delete those of the oldest steps beyond the bounds."""
        kept = [_clipped(sample) for sample in samples[:SAMPLES_MAX]]
        record: StepSamples = {"step": step, "time": time.time(), "total": total, "samples": kept}
        self._store.write(f"{job.folder(FOLDER)}/{_name(step)}", msgspec.json.encode(record))
        sizes = self._sizes(job)
        names = sorted(sizes)
        left = sum(sizes.values())
        gone: list[str] = []
        for name in names[:-1]:
            if left <= self._job_bytes_max and len(names) - len(gone) <= STEPS_MAX:
                break
            left -= sizes[name]
            gone.append(f"{job.folder(FOLDER)}/{name}")
        self._store.delete(gone)

    def steps(self, job: JobKey) -> list[int]:
        """The steps that have samples, ascending."""
        return sorted(int(name) - ZERO for name in self._sizes(job))

    def read(self, job: JobKey, step: int) -> StepSamples:
        """The samples of a step. Raises `NotFoundError`."""
        found = self._store.read(f"{job.folder(FOLDER)}/{_name(step)}")
        if found is None:
            raise NotFoundError(f"job {job.job!r} has no samples of step {step}: list its steps")
        return msgspec.json.decode(found, type=StepSamples)

    def _sizes(self, job: JobKey) -> dict[str, int]:
        """Bytes of each file of a job, by its name."""
        found = self._store.find(job.folder(FOLDER))
        return {each.key.rpartition("/")[2]: each.nbytes for each in found}


def _clipped(sample: SampleView) -> SampleView:
    return {
        **sample,
        "prompt": sample["prompt"][:CHARACTERS_MAX],
        "text": sample["text"][:CHARACTERS_MAX],
    }


def _name(step: int) -> str:
    return f"{step + ZERO:020d}"

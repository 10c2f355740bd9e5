"""Workload traces in one schema: reading, checking, recording, converting and generating."""

from plexrl.traces.bundled import bundled
from plexrl.traces.convert.recorder import record
from plexrl.traces.convert.shaping import Shape, shaped
from plexrl.traces.convert.wandb_runs import RunProfile, read_runs
from plexrl.traces.describe import describe_jobs, describe_lengths
from plexrl.traces.generate.generator import generate_jobs, generate_lengths, with_profiles
from plexrl.traces.generate.length_model import LengthModel, fit_lengths
from plexrl.traces.generate.published import MODEL_CLASSES, ModelClass
from plexrl.traces.generate.workload import Workload, fit_workload, published_workload
from plexrl.traces.io.files import read_jobs, read_lengths, validate, write_jobs, write_lengths
from plexrl.traces.io.problems import Problem, Problems
from plexrl.traces.schema import JOBS, LENGTHS, ResponseLength, TraceJob, TraceSegment
from plexrl.traces.sources import Source, check_trace, open_trace

__all__ = [
    "JOBS",
    "LENGTHS",
    "MODEL_CLASSES",
    "LengthModel",
    "ModelClass",
    "Problem",
    "Problems",
    "ResponseLength",
    "RunProfile",
    "Shape",
    "Source",
    "TraceJob",
    "TraceSegment",
    "Workload",
    "bundled",
    "check_trace",
    "describe_jobs",
    "describe_lengths",
    "fit_lengths",
    "fit_workload",
    "generate_jobs",
    "generate_lengths",
    "open_trace",
    "published_workload",
    "read_jobs",
    "read_lengths",
    "read_runs",
    "record",
    "shaped",
    "validate",
    "with_profiles",
    "write_jobs",
    "write_lengths",
]

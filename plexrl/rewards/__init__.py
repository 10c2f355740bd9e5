"""Rewards in the controller: graders, a sandbox for untrusted programs, concurrent grading."""

from plexrl.process.sandbox.limits import Ending, Limits, Program, ProgramRun
from plexrl.process.sandbox.sandbox import Sandbox
from plexrl.rewards.decisions.grading import OnFailure
from plexrl.rewards.decisions.timeouts import TimeoutSettings
from plexrl.rewards.grade import Grade, Outcome
from plexrl.rewards.graders.answers import exact, numeric
from plexrl.rewards.graders.judge import Judge, last_number
from plexrl.rewards.graders.mathematics import MathGrader
from plexrl.rewards.graders.programs import ProgramGrader, ProgramTest
from plexrl.rewards.scheduler import Graded, GradedSamples, RewardScheduler, SampleReward

__all__ = [
    "Ending",
    "Grade",
    "Graded",
    "GradedSamples",
    "Judge",
    "Limits",
    "MathGrader",
    "OnFailure",
    "Outcome",
    "Program",
    "ProgramGrader",
    "ProgramRun",
    "ProgramTest",
    "RewardScheduler",
    "SampleReward",
    "Sandbox",
    "TimeoutSettings",
    "exact",
    "last_number",
    "numeric",
]

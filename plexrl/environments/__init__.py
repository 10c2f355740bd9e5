"""Trajectories of several turns in the controller: the model replies, an environment or a tool
answers, and the model goes on."""

from plexrl.environments.adapters.interactive import GymEnvironment, OpenEnvEnvironment
from plexrl.environments.adapters.tasks import dataset_tasks, reasoning_gym_tasks
from plexrl.environments.adapters.verifiers import VerifiersEnvironment, VerifiersTasks
from plexrl.environments.environment import Environment, Message, Observation, Step
from plexrl.environments.roll_out import roll_out
from plexrl.environments.texts import ChatText, PlainText, TurnText
from plexrl.environments.tools import Task, ToolCall, ToolEnvironment, read_tool_calls, tool_schema
from plexrl.environments.trajectory import Trajectory

__all__ = [
    "ChatText",
    "Environment",
    "GymEnvironment",
    "Message",
    "Observation",
    "OpenEnvEnvironment",
    "PlainText",
    "Step",
    "Task",
    "ToolCall",
    "ToolEnvironment",
    "Trajectory",
    "TurnText",
    "VerifiersEnvironment",
    "VerifiersTasks",
    "dataset_tasks",
    "read_tool_calls",
    "reasoning_gym_tasks",
    "roll_out",
    "tool_schema",
]

"""Training backends: one rank of a model under one framework, behind one interface."""

from plexrl.worker.training.backend import TrainingBackend
from plexrl.worker.training.model import LossOfBatch, TrainingModel, TrainingRank

__all__ = ["LossOfBatch", "TrainingBackend", "TrainingModel", "TrainingRank"]

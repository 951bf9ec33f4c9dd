"""Predict memory and time of training steps and find the best layout, without torch."""

from shardwright.planner.candidate import (
    SHARDWRIGHT_CONVENTIONS,
    Candidate,
    FrameworkConventions,
    LowRankAdapter,
)
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.prediction import MemoryParts, Prediction, TimeParts
from shardwright.planner.predictor import Predictor, predict

__all__ = [
    "SHARDWRIGHT_CONVENTIONS",
    "Candidate",
    "Efficiency",
    "FrameworkConventions",
    "LowRankAdapter",
    "MemoryParts",
    "Prediction",
    "Predictor",
    "TimeParts",
    "predict",
]

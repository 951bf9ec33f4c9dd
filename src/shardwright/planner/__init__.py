"""Predict memory and time of training steps and find the best layout, without torch."""

from shardwright.planner.candidate import SHARDWRIGHT, Adapter, Candidate, Engine
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.predict import Predictor, predict
from shardwright.planner.prediction import MemoryParts, Prediction, TimeParts

__all__ = [
    "SHARDWRIGHT",
    "Adapter",
    "Candidate",
    "Efficiency",
    "Engine",
    "MemoryParts",
    "Prediction",
    "Predictor",
    "TimeParts",
    "predict",
]

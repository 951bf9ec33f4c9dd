"""Predict memory and time of training steps and find the best layout, without torch."""

from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.engine_model import EngineModel
from shardwright.planner.prediction import MemoryParts, Prediction, TimeParts
from shardwright.planner.predictor import Predictor, predict
from shardwright.planner.rates.efficiency import Efficiency

"""One training step as named stages, timed; their overlap comes here."""

from meseta.pipeline.step import Step, TrainStep
from meseta.pipeline.times import StageTimes

__all__ = ["StageTimes", "Step", "TrainStep"]

"""One training step as named stages, timed; their overlap comes here."""

from meseta.pipeline.step import Step, TrainStep
from meseta.telemetry.span import StageTimes

__all__ = ["StageTimes", "Step", "TrainStep"]

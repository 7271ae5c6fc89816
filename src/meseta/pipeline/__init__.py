"""Training steps as named stages, timed, one behind the other or hidden behind each other."""

from meseta.pipeline.ahead import ahead
from meseta.pipeline.pipeline import Pipeline, Step
from meseta.telemetry.span import StageTimes

__all__ = ["Pipeline", "StageTimes", "Step", "ahead"]

"""Training steps as named stages, timed, one behind the other or hidden behind each other."""

from meseta.pipeline.pipeline import Pipeline, StepResult
from meseta.pipeline.prefetch import ahead
from meseta.telemetry.span import StageTimes

__all__ = ["Pipeline", "StageTimes", "StepResult", "ahead"]

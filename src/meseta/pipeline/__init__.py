"""Training steps in timed stages, with communication overlapped by computation."""

from meseta.pipeline.losses import LateNonFiniteLoss
from meseta.pipeline.pipeline import Pipeline, StepResult
from meseta.pipeline.prefetch import ahead
from meseta.telemetry.span import StageTimes

__all__ = ["LateNonFiniteLoss", "Pipeline", "StageTimes", "StepResult", "ahead"]

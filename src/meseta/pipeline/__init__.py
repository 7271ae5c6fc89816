"""Training steps in timed stages, with communication overlapped by computation."""

from meseta.pipeline.ahead_loop import ahead
from meseta.pipeline.losses import LateNonFiniteLoss
from meseta.pipeline.overlap import choose_overlap
from meseta.pipeline.pipeline import Pipeline, StepResult
from meseta.telemetry.span import StageTimes

__all__ = ["LateNonFiniteLoss", "Pipeline", "StageTimes", "StepResult", "ahead", "choose_overlap"]

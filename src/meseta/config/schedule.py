"""Config of a learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from meseta.config.section import NonNegativeInt, PositiveInt, Section, UsedBy


class ScheduleConfig(Section):
    """Factor on the base learning rate, with a linear warm-up, a constant phase and a decay to end_factor."""

    kind: Literal["constant", "polynomial", "cosine", "step", "plateau"] = "constant"
    """Schedule after the warm-up. 'polynomial' and 'cosine' decay between two steps. 'step' multiplies the factor by
    `step_factor` every `step_every` steps, and 'plateau' whenever evaluations stop improving."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the factor rises linearly to 1."""
    decay_start_step: NonNegativeInt = 0
    """Step, counted from 0, at which the decay starts, but not before the end of the warm-up. Kind 'plateau' ignores
    earlier evaluations."""
    decay_steps: NonNegativeInt = 0
    """Length of the decay in steps; 0: until the end of training."""
    power: Annotated[float, UsedBy("polynomial")] = Field(default=2.0, gt=0)
    """Exponent of the decay."""
    end_factor: float = Field(default=0.0, ge=0)
    """Factor after the decay. For 'step' and 'plateau' it is the smallest factor."""
    step_factor: Annotated[float, UsedBy("step", "plateau")] = Field(default=0.1, gt=0, lt=1)
    """Multiplier of the factor at each reduction."""
    step_every: Annotated[PositiveInt | None, UsedBy("step")] = None
    """Number of steps between reductions, from the start of the decay."""
    plateau_patience: Annotated[PositiveInt, UsedBy("plateau")] = 2
    """Number of successive evaluations without improvement after which the factor is reduced. The metric and min_delta
    of train.early_stopping define an improvement. The count restarts after a reduction."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.kind == "step" and self.step_every is None:
            raise ValueError("kind 'step' needs step_every, the number of steps between reductions; set it")
        return self

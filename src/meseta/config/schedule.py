"""The config of a learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from meseta.config.section import NonNegativeInt, PositiveInt, Section, UsedBy


class ScheduleConfig(Section):
    """Factor on the base learning rate: linear warm-up, then constant, then decay to end_factor."""

    kind: Literal["constant", "polynomial", "cosine", "step", "plateau"] = "constant"
    """After the warm-up: 'constant', 'polynomial' or 'cosine' decay between two steps, 'step': a fall by
    `step_factor` every `step_every` steps, or 'plateau': a fall by `step_factor` where evaluations gain no more."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the factor rises linearly to 1."""
    decay_start_step: NonNegativeInt = 0
    """Step, counted from 0, at which the decay begins, but not before the end of the warm-up; plateau: evaluations
    before it do not count."""
    decay_steps: NonNegativeInt = 0
    """Length of the decay in steps; 0: until the end of training."""
    power: Annotated[float, UsedBy("polynomial")] = Field(default=2.0, gt=0)
    """Exponent of the decay."""
    end_factor: float = Field(default=0.0, ge=0)
    """Factor at and after the end of the decay; under 'step' and 'plateau', the least factor."""
    step_factor: Annotated[float, UsedBy("step", "plateau")] = Field(default=0.1, gt=0, lt=1)
    """What the factor is multiplied by at each fall."""
    step_every: Annotated[PositiveInt | None, UsedBy("step")] = None
    """Steps between falls, counted from the start of the decay."""
    plateau_patience: Annotated[PositiveInt, UsedBy("plateau")] = 2
    """Evaluations in a row without gain, by the metric and min_delta of train.early_stopping, that make the factor
    fall; counted anew after a fall."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.kind == "step" and self.step_every is None:
            raise ValueError("kind 'step' needs step_every, the steps between falls of the rate; set it")
        return self

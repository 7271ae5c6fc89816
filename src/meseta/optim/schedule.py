"""Learning-rate schedules, as a factor on the base rate."""

from __future__ import annotations

import math

from meseta.config import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int, num_falls: int = 0) -> float:
    """Factor for `step`, counted from 0, in a training of `num_steps` steps.

    As in MLPerf's DLRM: the factor rises linearly to 1 over the warm-up, stays there until the decay begins, and then
    falls, 'polynomial' as (1 - progress) ** power, 'cosine' as (1 + cos(pi * progress)) / 2 (arXiv 1608.03983, equation
    5, without restarts), here from 1 to `end_factor`. The decay never begins inside the warm-up, the first step of the
    decay still has factor 1, and steps after the decay have `end_factor`. 'step' multiplies by `step_factor` every
    `step_every` steps of the decay, down to `end_factor`; 'plateau' has done so `num_falls` times, which evaluations
    decide.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    decay_start_step = max(schedule.decay_start_step, schedule.warmup_steps)
    if schedule.kind == "constant" or step < decay_start_step:
        return 1.0
    if schedule.kind in ("step", "plateau"):
        falls = num_falls if schedule.kind == "plateau" else (step - decay_start_step) // (schedule.step_every or 1)
        return max(schedule.step_factor**falls, schedule.end_factor)
    decay_steps = schedule.decay_steps or num_steps - decay_start_step
    if step >= decay_start_step + decay_steps:
        return schedule.end_factor
    progress = (step - decay_start_step) / decay_steps
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else (1.0 - progress) ** schedule.power
    return schedule.end_factor + (1.0 - schedule.end_factor) * left

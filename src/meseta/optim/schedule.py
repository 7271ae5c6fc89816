"""Learning-rate schedules as a factor of the base rate."""

from __future__ import annotations

import math

from meseta.config import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int, num_falls: int = 0) -> float:
    """Return the factor of the learning rate for `step`, which starts at 0.

    As in MLPerf's DLRM, the factor rises linearly to 1 during the warm-up, stays 1 until the decay starts, and then
    decreases. The first step of the decay still has factor 1. Steps after the decay have `end_factor`.

    Args:
        schedule: Shape of the decay. 'polynomial' is (1 - progress) ** power. 'cosine' is (1 + cos(pi * progress)) / 2
            (arXiv 1608.03983, equation 5, without restarts). Both are scaled to end at `end_factor`. 'step' multiplies
            by `step_factor` every `step_every` steps, and 'plateau' after evaluations without progress, both down to
            `end_factor`.
        step: Index of the step.
        num_steps: Number of steps of the training, at which the decay ends by default.
        num_falls: Number of decreases so far, for 'plateau'.
    """
    # The decay never starts during the warm-up.
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

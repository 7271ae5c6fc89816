"""Steps of MesetaTraining, also with the package of another checkout."""

from __future__ import annotations

from typing import Any

_step: list[Any] = []


def build(shape: dict[str, Any]) -> None:
    import torch
    from peers.e2e_meseta import MesetaTraining

    torch.set_num_threads(1)
    _step[:] = [MesetaTraining(shape, "sgd")]
    _step[0].time("step", 0, 2)


def time_steps(num_steps: int) -> float:
    seconds: float = _step[0].time("step", 0, num_steps)
    return seconds / num_steps

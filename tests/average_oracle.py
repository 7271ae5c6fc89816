"""Weights of checkpoints, and their averages over steps, computed with numpy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from meseta.checkpoint.exporting import export

METRICS = ("logloss", "auc", "ne")
KINDS: dict[str, dict[str, Any]] = {
    "swa": {"train__average_weights": "swa", "train__average_start_step": 2},
    "ema": {"train__average_weights": "ema", "train__average_decay": 0.6},
}
Weights = dict[str, np.ndarray]


def stored_weights(path: Any, out: Path, *, states: bool = False) -> Weights:
    """Return the rows and dense tensors of an export, in float64."""
    shutil.rmtree(out, ignore_errors=True)
    export(path, out, "safetensors", states=states)
    tensors = {f"table.{file.stem}": load_file(file)["row"] for file in (out / "tables").iterdir()}
    tensors |= {name: t for name, t in load_file(out / "dense.safetensors").items() if name.startswith("model.")}
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def average_of(kind: str, steps: list[Weights]) -> Weights:
    """Return the average of the weights after steps 1, 2, ..."""
    if kind == "swa":
        return {name: np.mean([weights[name] for weights in steps[2:]], axis=0) for name in steps[0]}
    mean = dict(steps[0])
    for weights in steps[1:]:
        mean = {name: 0.6 * mean[name] + 0.4 * weights[name] for name in mean}
    return mean


def differences(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)

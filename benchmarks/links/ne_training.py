"""Run of the main job on all ranks."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import torch
from paired import move_by_an_ulp

from meseta.comm import World
from meseta.config import read_config_document, validate_document
from meseta.train.trainer import Trainer


def train(config: str, overrides: list[str], moved: bool) -> dict[str, Any]:
    """Return the metrics of the test split. With `moved`, one dense weight is moved by one ulp."""
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = Trainer(validate_document(read_config_document(Path(config), overrides)), World.current())
        if moved:
            move_by_an_ulp(next(iter(trainer.model.parameters())).detach().view(-1)[:1])
        summary = trainer.run()
    return {"ne": summary["test"]["ne"], "auc": summary["test"]["auc"], "steps": summary["num_steps"],
            "seconds": time.perf_counter() - start_s}  # fmt: skip

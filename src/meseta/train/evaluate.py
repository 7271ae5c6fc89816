"""Every row of a split once, over all ranks: metrics, or predictions in the order of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meseta.comm import World
from meseta.data.reader import Reader
from meseta.pipeline.step import Model
from meseta.train.metrics import Metrics, MetricWindow
from meseta.train.state import ids_outside


def predict(model: Model, reader: Reader, world: World) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """(logits, labels) of this rank's slice of each global batch, without any update."""
    with torch.no_grad():
        for batch in reader.epoch():
            on_device = batch.to(world.device, non_blocking=True)
            pooled = model.embeddings(on_device.sparse).pooled.values
            logits = model.score(on_device.dense, pooled)
            yield logits.cpu().numpy(), batch.label.numpy()


def evaluate(model: Model, reader: Reader, world: World) -> tuple[Metrics, dict[str, int]]:
    """Metrics over all rows of the reader's split, the same on every rank and for any number of ranks.

    The second value counts ids outside their table, by feature; training's own count is left as it was.
    """
    window, embeddings = MetricWindow(), model.embeddings
    counted, embeddings.num_outside = embeddings.num_outside, None
    for logits, labels in predict(model, reader, world):
        window.add(logits, labels)
    outside = ids_outside(embeddings, world)
    embeddings.num_outside = counted
    return gather_window(window, world).compute(), outside


def gather_window(window: MetricWindow, world: World) -> MetricWindow:
    """The samples of all ranks, in the order of ranks."""
    return MetricWindow.merge(world.gather_objects(window.get_state()))


def gather_rows(parts: NDArray[Any], world: World) -> NDArray[Any]:
    """The slices of one global batch, put together in the order of its rows."""
    return np.concatenate(world.gather_objects(parts))

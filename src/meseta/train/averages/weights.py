"""Averaged weights of a run. Evaluations use them, and training continues from the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meseta.checkpoint.averages import AVERAGE_KEY, AVERAGE_PREFIX
from meseta.comm import World
from meseta.comm.dense import distribute_like
from meseta.config import TrainConfig
from meseta.data.read.batch_reader import BatchReader
from meseta.embedding.batch_context import OutOfRangeIds
from meseta.models.global_layers import SyncBatchNorm
from meseta.models.layers import select_score_input
from meseta.optim.dense import to_local
from meseta.optim.dense_average import DenseAverage
from meseta.pipeline import Pipeline
from meseta.spec import MesetaError
from meseta.system.waits import track_activity


class WeightAverage:
    """Average of all weights of a run, or the weights themselves if the run has no average."""

    def __init__(
        self, config: TrainConfig, pipeline: Pipeline, world: World, open_training_rows: Callable[[], BatchReader]
    ) -> None:
        """Create the average, which the pipeline updates. `open_training_rows` returns a reader for batch norm."""
        self.spec = config.average_spec
        self._model = cast(Any, pipeline.model)
        self._world, self._open_training_rows = world, open_training_rows
        self._num_norm_batches = config.average_norm_batches
        self._is_applied = False
        self._dense: DenseAverage | None = None
        kinds = SyncBatchNorm, _BatchNorm  # A custom model may use layers of torch.
        norms = [(name, layer) for name, layer in self._model.named_modules() if isinstance(layer, kinds)]
        self._norms = [layer for _, layer in norms]
        self._statistics = {f"{name}.{key}": value for name, layer in norms for key, value in layer.named_buffers()}
        # Statistics for the averages, and the step for which they were computed.
        self._averaged_statistics: dict[str, Tensor] = {}
        self._statistics_step = -1
        if self.spec is not None:
            self._dense = pipeline.dense_average = DenseAverage(self.spec, self._model)

    @property
    def _step(self) -> int:
        return int(self._model.embeddings.step)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager in which the model has averaged weights, and may be evaluated but not trained. Collective.

        Batch norm has statistics of training batches for these weights. Calls may be nested.
        """
        if self._dense is None or self.spec is None or self._is_applied or not self.spec.num_averaged(self._step):
            yield
            return
        former = {name: value.clone() for name, value in self._statistics.items()}
        self._is_applied = True
        self._dense.swap()
        try:
            with self._model.embeddings.averaged():
                self._use_statistics()
                yield
        finally:
            self._copy(self._statistics, former)
            self._dense.swap()
            self._is_applied = False

    def _use_statistics(self) -> None:
        if not self._statistics:
            return
        if self._statistics_step != self._step:
            with track_activity("computing statistics of batch norm for averaged weights"):
                self._compute_statistics()
            self._averaged_statistics = {name: value.clone() for name, value in self._statistics.items()}
            self._statistics_step = self._step
        self._copy(self._statistics, self._averaged_statistics)

    @torch.no_grad()
    def _compute_statistics(self) -> None:
        """Set the running statistics to their means over training batches, as torch.optim.swa_utils.update_bn does."""
        model, embeddings, outside = self._model, self._model.embeddings, OutOfRangeIds()
        with _means_over_batches(model, self._norms), closing(self._open_training_rows().epoch()) as batches:
            for batch in islice(batches, self._num_norm_batches):
                on_device = batch.to(self._world.device, non_blocking=True)
                context = embeddings.start_input_dist(on_device.sparse, out_of_range_ids=outside)
                pooled = select_score_input(model, embeddings(embeddings.input_dist(context)))
                model.score(on_device.dense, pooled)

    def get_state(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's state."""
        return {} if self.spec is None else {AVERAGE_KEY: asdict(self.spec)}

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the averages by name for a checkpoint. Collective."""
        if self._dense is None or self.spec is None:
            return {}
        tensors: Mapping[str, Tensor] = self._dense.parameters
        statistics: Mapping[str, Tensor] = self._statistics
        if self.spec.num_averaged(self._step):
            tensors = self._dense.averages
            if self._statistics:
                with self.applied():
                    statistics = self._averaged_statistics
        names = {id(parameter): name for name, parameter in self._dense.parameters.items()}
        named = self._model.named_parameters(remove_duplicate=False)  # Tied parameters have several names.
        averages = {name: tensors[names[id(parameter)]].detach() for name, parameter in named}
        return {f"{AVERAGE_PREFIX}{name}": value for name, value in {**averages, **statistics}.items()}

    def reset(self) -> None:
        """Set the average to the current weights."""
        if self._dense is not None:
            self._dense.reset()

    @torch.no_grad()
    def set_tensors(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore the averages of a checkpoint. Raises MesetaError if one is missing or its shape differs."""
        if self._dense is None:
            return
        saved = {name.removeprefix(AVERAGE_PREFIX): t for name, t in tensors.items() if name.startswith(AVERAGE_PREFIX)}
        for name, expected in {**self._dense.averages, **self._statistics}.items():
            shape = list(saved[name].shape) if name in saved else "missing"
            if shape != list(expected.shape):
                raise MesetaError(
                    f"{where}: dense tensor {AVERAGE_PREFIX + name!r} is {shape}, but must be {list(expected.shape)}; "
                    "use the config that it was trained with"
                )
        for name, average in self._dense.averages.items():
            to_local(average).copy_(to_local(distribute_like(saved[name], average)))
        self._averaged_statistics = {name: saved[name].to(self._world.device) for name in self._statistics}
        self._statistics_step = self._step

    @staticmethod
    def _copy(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            target.copy_(values[name])


@contextmanager
def _means_over_batches(model: nn.Module, norms: Sequence[SyncBatchNorm | _BatchNorm]) -> Iterator[None]:
    """Context manager in which forward passes are those of training, and running statistics are means over batches."""
    was_training = [module.training for module in model.modules()]
    momenta = [layer.momentum for layer in norms if isinstance(layer, _BatchNorm)]
    model.train()
    for layer in norms:
        if isinstance(layer, SyncBatchNorm):
            layer.num_recomputed = 0
        else:
            layer.reset_running_stats()
            layer.momentum = None  # A cumulative mean.
    try:
        yield
    finally:
        for layer in norms:
            if isinstance(layer, SyncBatchNorm):
                layer.num_recomputed = None
            else:
                layer.momentum = momenta.pop(0)
        for module, training in zip(model.modules(), was_training, strict=True):
            module.training = training

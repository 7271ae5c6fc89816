"""CUDA graphs of training steps on one rank: which steps can be captured, and the graphs by layout of their batch."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.data.read.packing import PackedLayout
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.batch_context import RejectedId
from meseta.models.layers import GLOBAL_LOSS_HOOKS, loss_term_names
from meseta.optim.dense import GradientClipper, dense_parameters, is_capturable
from meseta.pipeline.device_copy import PendingCopy
from meseta.spec import MesetaError
from meseta.system.ranks import print_note
from meseta.telemetry.span import CapturedStages

MAX_WAITING_STEPS = 2
"""Number of successive eager steps that wait for the device after which no step is captured."""
MAX_GRAPHS = 16
"""Maximum number of layouts for which steps are captured."""
SYNC_WARNING = "synchronizing CUDA operation"
"""Part of torch's warning about an operator that waits."""
TIMED_STEP_INTERVAL = 20
"""Number of replayed steps per step whose stages are timed."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """Training step in a CUDA graph. Each replay reads `buffer` and overwrites the results."""

    graph: Any
    buffer: Tensor
    """Packed batch on the device, uint8."""
    batch: Batch
    """Batch of which `buffer` has the tensors that differ between replays."""
    logits: Tensor
    report: Tensor
    """See `LossAgreement.report`."""
    rejected_ids: Sequence[Sequence[RejectedId]]
    stages: CapturedStages | None
    """Stages with events in the graph. `None` if it is not timed."""

    def replay(self, packed: Tensor) -> None:
        """Train on a packed batch with the layout of this step. The host does not wait."""
        self.buffer.copy_(packed)
        self.graph.replay()


@dataclass(frozen=True)
class _GraphKey:
    layout: PackedLayout
    is_timed: bool


class StepGraphs:
    """CUDA graphs of one pipeline. They share one pool of memory."""

    # A step with a new layout runs eagerly once: it compiles kernels, and creates the constants and moments that the
    # capture needs. The next one is captured, unless the first one has waited for the device. Its capture would fail,
    # from which torch does not recover completely.

    def __init__(self) -> None:
        self._steps: dict[_GraphKey, CapturedStep] = {}
        self._warm_layouts: set[PackedLayout] = set()
        self._watched: PackedLayout | None = None
        """Layout of the current step if it is the first one with this layout."""
        self._num_waiting_steps = 0
        self._signature: object = None
        self._pool: Any = None
        self._num_since_timed = 0
        self._batch_size = 0
        """Number of samples of the largest batch. Only batches of this size are captured."""
        self.reason: str | None = None
        """Reason for which no step can be captured."""
        self.num_replayed = 0
        self.eager_reasons: Counter[str] = Counter()
        """Number of steps that ran eagerly, by reason."""

    @property
    def num_captured(self) -> int:
        """Number of graphs."""
        return len(self._steps)

    def begin_loop(self, reason: str | None, signature: object) -> None:
        """Start a training loop. Graphs are dropped if `signature` differs from that of the last call.

        `reason` is the reason for which no step can be captured, or `None`.
        """
        self.reason = reason
        if signature != self._signature:
            self.drop()
        self._signature = signature

    def drop(self) -> None:
        """Drop all graphs, such as after a refused step. The next step of each layout runs eagerly."""
        self._steps.clear()
        self._warm_layouts.clear()

    def find(
        self, copy: PendingCopy, capture: Callable[[PendingCopy, bool], CapturedStep], *, is_recorded: bool = False
    ) -> CapturedStep | None:
        """Return the captured step for a batch, or `None` if it must run eagerly.

        Args:
            copy: Packed batch.
            capture: Function that captures the step of a batch, timed if its argument is true. If it raises an error,
                all later steps run eagerly.
            is_recorded: Whether the stages of the step are recorded, which requires an eager step.
        """
        reason = self._eager_reason(copy) or ("recorded timeline" if is_recorded else None)
        if reason is not None:
            self.eager_reasons[reason] += 1
            return None
        step = self._find_timed(copy, capture) if self._num_since_timed + 1 >= TIMED_STEP_INTERVAL else None
        step = step or self._find(_GraphKey(copy.part.layout, False), copy, capture)
        if step is None:
            assert self.reason is not None
            self.eager_reasons[self.reason] += 1
        else:
            self.num_replayed += 1
            self._num_since_timed += 1
        return step

    def pop_num_timed(self) -> int:
        """Return the number of replayed steps since the last timed one, and start to count again."""
        count, self._num_since_timed = self._num_since_timed, 0
        return count

    @contextmanager
    def capturing(self) -> Iterator[Any]:
        """Context manager that captures the work of the current thread in a new CUDA graph, which it returns."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate pinned buffers and read events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            yield graph

    @contextmanager
    def watch_waits(self) -> Iterator[None]:
        """Context manager around an eager step, which finds out whether the first step of a layout waits."""
        layout, self._watched = self._watched, None
        if layout is None:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            caught.clear()  # Torch has warned that this mode is a prototype.
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        others = [one for one in caught if SYNC_WARNING not in str(one.message)]
        for one in others:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        self._num_waiting_steps = self._num_waiting_steps + 1 if len(others) < len(caught) else 0
        if self._num_waiting_steps:
            self._warm_layouts.discard(layout)
        if self._num_waiting_steps >= MAX_WAITING_STEPS:
            self.reason = "a model that waits for the device"

    def _eager_reason(self, copy: PendingCopy) -> str | None:
        part, weight = copy.part, copy.totals.weight
        self._batch_size = max(self._batch_size, part.batch.batch_size)
        if part.batch.batch_size < self._batch_size:
            return "short batch"
        if not (weight > 0 and math.isfinite(weight)):
            return "no finite positive weight"
        if len(set(part.batch.sparse.batch_sizes)) > 1:
            return "features of several batch sizes"
        if part.layout not in self._warm_layouts:
            if len(self._warm_layouts) == MAX_GRAPHS:
                return f"more than {MAX_GRAPHS} layouts of batches"
            self._warm_layouts.add(part.layout)
            self._watched = part.layout
            return "first step of a layout"
        return None

    def _find_timed(
        self, copy: PendingCopy, capture: Callable[[PendingCopy, bool], CapturedStep]
    ) -> CapturedStep | None:
        step = self._find(_GraphKey(copy.part.layout, True), copy, capture)
        return None if step is None or step.stages is None or step.stages.is_pending else step

    def _find(
        self, key: _GraphKey, copy: PendingCopy, capture: Callable[[PendingCopy, bool], CapturedStep]
    ) -> CapturedStep | None:
        if key not in self._steps and self.reason is None:
            try:
                self._steps[key] = capture(copy, key.is_timed)
            except (MesetaError, RuntimeError) as error:
                # The model calls what a graph cannot contain, other than the waits that were watched for.
                self.reason = f"the step cannot be captured: {str(error).splitlines()[0]}"
                print_note(f"steps are not replayed from CUDA graphs: {self.reason}")
        return self._steps.get(key) if self.reason is None else None


def find_eager_reason(
    model: Any,
    embeddings: BaseEmbeddingCollection[Any],
    optimizer: torch.optim.Optimizer,
    clip: GradientClipper | None,
    world: World,
    accumulate_steps: int,
) -> str | None:
    """Return why no step of a training can be captured in a CUDA graph, or `None`."""
    rows = [table.optimizer for table in embeddings.tables]
    reasons = {
        "several ranks": world.size > 1,
        "gradient accumulation": accumulate_steps > 1,
        "gradient clipping": clip is not None and (clip.norm is not None or clip.includes_rows),
        f"dense optimizer {type(optimizer).__name__}": not is_capturable(optimizer),
        "sharded dense parameters": any(hasattr(parameter, "to_local") for parameter in dense_parameters(optimizer)),
        "rows outside of the GPU's memory": embeddings.has_offloaded_rows,
        "unpooled features": any(feature.pooling == "none" for feature in embeddings.features),
        "id policy 'drop'": any(feature.id_policy == "drop" for feature in embeddings.features),
        "several batches of features": len(embeddings.groups) > 1,
        "row optimizer that steps untouched rows": any(spec.stepped_rows == "all" for spec in rows),
        "row optimizer with a penalty of looked-up rows": any(spec.stepped_rows == "looked_up" for spec in rows),
        "float64 rows": embeddings.dtype == torch.float64,
        "emulated rounding of exchanges": embeddings.emulates_rounding,
        "losses of the global batch": bool(loss_term_names(model, *GLOBAL_LOSS_HOOKS)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def graph_signature(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return what CUDA graphs of a model have captured besides batches: addresses, modes and constants."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    module_tensors = [*model.parameters(), *model.buffers()] if modules else []
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
    tensors = [*module_tensors, *dense_parameters(optimizer), *moments]
    shards = [shard.rows.weight for shard in model.embeddings.shards if hasattr(shard, "rows")]
    constants = [
        tuple((name, str(value)) for name, value in group.items() if name not in ("params", "lr"))
        for group in optimizer.param_groups
    ]
    addresses = tuple(tensor.data_ptr() for tensor in (*tensors, *shards))
    modes = [module.training for module in modules] + [tensor.requires_grad for tensor in module_tensors]
    return addresses, tuple(constants), tuple(modes)


def record_external_event() -> Any:
    """Record a new event in the CUDA graph that is captured. Each replay records it again."""
    event = torch.cuda.Event(enable_timing=True, external=True)
    event.record()
    return event

"""Choice of the dtype of the dense part, and whether bfloat16 is fast on the processors of all ranks."""

from __future__ import annotations

import statistics
import time

import torch

from meseta import checkpoint
from meseta.checkpoint.manifest import read_manifest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.precision import dense_dtype
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.spec.tables import DenseDtype
from meseta.system.processors import read_processor

DENSE_DTYPE_KEY = "dense_dtype"
"""Key of the dense dtype in the state of a checkpoint."""
# Minimum compute capability of GPUs with bfloat16 tensor cores.
_MIN_CAPABILITY = (8, 0)
# Rows, inputs and outputs of the timed layer.
_PROBE_SHAPE = (256, 512, 512)
_NUM_PROBES = 3


def resolve_dense_dtype(config: RunConfig, world: World) -> RunConfig:
    """Return the config with a dtype in place of 'auto'. Collective.

    A resumed run keeps the dtype of its checkpoint. A new run uses bfloat16 if every rank has instructions for it.
    Raises MesetaError, on all ranks, if the checkpoints cannot be read. Also raises it for a new run with dtype
    bfloat16 if a rank has no instructions for it, unless `dense.check_speed` is false.
    """
    has_begun, former = world.broadcast_from_rank_0(lambda: _previous_dtype(config))
    dense = config.dense
    if dense.dtype == "bfloat16" and dense.check_speed and not has_begun:
        world.raise_on_all_ranks(_slow_bfloat16_error(world.device))
    slow = world.all_gather_object(bfloat16_slow_reason(world.device))
    dtype = former if former and dense.dtype == "auto" else dense_dtype(config, is_fast=not any(slow))
    return config.model_copy(update={"dense": dense.model_copy(update={"dtype": dtype})})


def bfloat16_slow_reason(device: torch.device) -> str | None:
    """Return why bfloat16 is slower than float32 on this rank's device, or `None` if it is faster."""
    if device.type != "cuda":
        return read_processor().bfloat16_unavailable_reason()
    capability = torch.cuda.get_device_capability(device)
    if capability >= _MIN_CAPABILITY:
        return None
    name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
    return f"{name} has compute capability {version}, but bfloat16 needs 8.0"


def bfloat16_note(config: RunConfig, world: World) -> str | None:
    """Return a note if bfloat16 is slow on a rank, or its results depend on the number of threads. Collective.

    The note is the same on all ranks. `None` if there is nothing to report.
    """
    if config.dense.dtype != "bfloat16":
        return None
    why = bfloat16_slow_reason(world.device) if config.dense.check_speed else None
    text = None if why is None else f"the dense part computes in bfloat16, as in training, which is slow here: {why}"
    if text is None and world.device.type == "cpu":
        text = read_processor().thread_dependence_reason()
    texts = world.all_gather_object(text)
    rank, text = next(((rank, text) for rank, text in enumerate(texts) if text), (0, None))
    where = f"rank {rank}: " if world.size > 1 else ""
    return text and f"note: {where}{text}"


def _previous_dtype(config: RunConfig) -> tuple[bool, DenseDtype | None]:
    """Return (whether the run resumes from a checkpoint of run_dir or its mirror, the dense dtype of that
    checkpoint)."""
    path = checkpoint.newest(config.checkpoint_location)
    try:
        if path is not None:
            state = read_manifest(path)["state"]
        elif config.checkpoint.mirror:
            newest = next(checkpoint.Mirror(config.checkpoint.mirror).checkpoints(newest_first=True), None)
            if newest is None:
                return False, None
            if newest.manifest is None:
                return True, None
            state = newest.manifest["state"]
        else:
            return False, None
    except StorageError:
        raise
    except MesetaError:  # Loading the checkpoint raises the same error with a remedy.
        return True, None
    former = state.get(DENSE_DTYPE_KEY)
    return True, former if former in ("float32", "bfloat16") else None


def _slow_bfloat16_error(device: torch.device) -> MesetaError | None:
    why = bfloat16_slow_reason(device)
    if why is None:
        return None
    rows, inputs, outputs = _PROBE_SHAPE
    half_ms, float_ms = (1e3 * _linear_layer_s(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    return MesetaError(
        f"dense.dtype 'bfloat16' is slow: {why}; a product of {rows} x {inputs} x {outputs} took {half_ms:.3g} ms, and "
        f"in float32 {float_ms:.3g} ms; set dense.dtype to float32 or auto, or dense.check_speed=false to use "
        "bfloat16 anyway"
    )


def _linear_layer_s(device: torch.device, dtype: torch.dtype) -> float:
    rows, inputs, outputs = _PROBE_SHAPE
    x = torch.ones(rows, inputs, device=device, dtype=dtype)
    weight = torch.ones(outputs, inputs, device=device, dtype=dtype)
    seconds = []
    for _ in range(_NUM_PROBES):
        start_s = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)

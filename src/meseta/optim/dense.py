"""Optimizers, learning rates and gradient clipping of the dense part. No result depends on the number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from meseta.ops.step_scalars import StepNumbers, StepScalars
from meseta.sparse.shapes import Float
from meseta.spec import COLUMN_BLOCK, MesetaError

if TYPE_CHECKING:  # Operators are tested without pydantic.
    from meseta.config import DenseOptimizerConfig, RunConfig, ScheduleConfig

NORM_EPSILON = 1e-6
"""Added to a norm before division, as in torch.nn.utils.clip_grad_norm_."""
CHUNK_ELEMENTS = 4096
"""Number of elements per norm. Torch computes such a norm in one thread."""
MAX_SQUARE = 2.0**1000  # Sums of smaller numbers do not overflow.
UPPER_BITS = -(1 << 27)  # sign, exponent and upper half of the mantissa of a float64


SumOverRanks = Callable[[float], float]
"""Function that sums a number over the ranks that hold shards of tensors. All ranks get bitwise identical results."""


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a sharded tensor, or the tensor itself. Shares its memory."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def global_norm(tensors: Iterable[Tensor], sum_over_ranks: SumOverRanks | None = None) -> float:
    """Return the Euclidean norm of all tensors together, computed in float64.

    `sum_over_ranks` is used for sharded tensors. All ranks must then call this function together.
    """
    # Torch splits a sum to a scalar between its threads, which changes the last bits. Therefore torch computes only
    # norms of chunks, and their squares are added exactly.
    tensors = list(tensors)
    cut = [tensor for tensor in tensors if hasattr(tensor, "to_local")]
    square = _sum_of_squares(tensor for tensor in tensors if not hasattr(tensor, "to_local"))
    if sum_over_ranks is not None and cut:
        square += sum_over_ranks(_sum_of_squares(map(to_local, cut)))
    return math.sqrt(square)


def _sum_of_squares(tensors: Iterable[Tensor]) -> float:
    return math.fsum(_square_terms(_chunks(tensors)))


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // CHUNK_ELEMENTS * CHUNK_ELEMENTS
        yield from (flat[:whole].view(-1, CHUNK_ELEMENTS), flat[whole:].view(1, -1))


def _column_blocks(rows: Iterable[Tensor]) -> Iterator[Tensor]:
    # Column shards have the blocks of whole rows.
    for gradient in rows:
        missing = -gradient.shape[1] % COLUMN_BLOCK
        yield (pad(gradient, (0, missing)) if missing else gradient).reshape(-1, COLUMN_BLOCK)


def _square_terms(matrices: Iterable[Tensor]) -> list[float]:
    """Return numbers with the exact sum of the squared norms of all rows, or NaN if an element is not finite."""
    norms = [torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64) for matrix in matrices]
    squares = torch.cat([norm.cpu() for norm in norms]).square() if norms else torch.empty(0, dtype=torch.float64)
    if squares.numel() == 0:
        return []
    if not bool((squares < MAX_SQUARE).all()):
        return [math.nan]
    # Halves of mantissas with one exponent have exact sums in float64, in any order, for up to 2^26 squares.
    exponents = squares.frexp().exponent
    exponents -= exponents.min()
    upper = (squares.view(torch.int64) & UPPER_BITS).view(torch.float64)
    return [*exponents.bincount(upper).tolist(), *exponents.bincount(squares - upper).tolist()]


@dataclass(frozen=True)
class NormExchange:
    """Exchange of squared norms between ranks."""

    start_gather: Callable[[list[float]], Callable[[], list[float]]]
    """Function that starts to gather numbers, and returns a function that waits for those of all ranks."""
    counts_sharded: bool
    """Whether this rank counts its shards of dense parameters."""


@dataclass(frozen=True, kw_only=True)
class GradientClipper:
    """Clipping of dense gradients, optionally with one norm that includes gradients of embedding rows.

    Values are clipped before the norm is computed.
    """

    value: float | None = None
    """Limit for each element: -value..value. `None` means no limit."""
    norm: float | None = None
    """Maximum norm of all gradients together (arXiv 1211.5063, algorithm 1). `None` means no limit."""
    includes_rows: bool = False
    """Whether row gradients are part of the norm. The gradient of a row is its sum over the batch."""
    sum_over_ranks: SumOverRanks | None = None
    """Sum for gradients that are sharded over ranks, if there is no `exchange`."""
    exchange: NormExchange | None = None
    """Exchange with the other ranks if `includes_rows`. `None` in one process."""

    def __call__(
        self, parameters: Iterable[Tensor], rows: Sequence[Tensor] = (), replicated_rows: Sequence[Tensor] = ()
    ) -> float:
        """Clip the gradients in place and return the factor applied by `norm`. The caller must scale the rows by it.

        `rows` are the gradients [U, D] of this rank's rows, and `replicated_rows` those of rows that all ranks have.
        Replicated gradients stay identical on all ranks. Raises MesetaError, on all ranks, if `norm` is set and a
        gradient is not finite.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = [to_local(gradient) for gradient in gradients]
        if self.value is not None and local:
            torch._foreach_clamp_min_(local, -self.value)
            torch._foreach_clamp_max_(local, self.value)
        if self.norm is None:
            return 1.0
        if self.includes_rows:
            norm = self._norm_with_rows(gradients, rows, replicated_rows)
        else:
            norm = global_norm(gradients, self.sum_over_ranks)
        if not math.isfinite(norm):
            whose, key = ("", "train") if self.includes_rows else (" of the dense part", "dense")
            raise MesetaError(
                f"the gradients{whose} are not finite, so {key}.clip_norm cannot scale them; "
                "lower the learning rates, or set dense.clip_value to limit each element"
            )
        if norm <= self.norm:
            return 1.0
        factor = self.norm / (norm + NORM_EPSILON)
        if local:
            torch._foreach_mul_(local, factor)
        return factor

    def _norm_with_rows(
        self, gradients: Sequence[Tensor], rows: Sequence[Tensor], replicated_rows: Sequence[Tensor]
    ) -> float:
        sharded = [to_local(gradient) for gradient in gradients if hasattr(gradient, "to_local")]
        is_counted = self.exchange is None or self.exchange.counts_sharded
        terms = _square_terms([*_column_blocks(rows), *(_chunks(sharded) if is_counted else ())])
        # A sum is sent with its rounding error, so that the norm does not depend on the ranks of the rows.
        square = math.fsum(terms)
        wait = None if self.exchange is None else self.exchange.start_gather([square, math.fsum([*terms, -square])])
        replicated = _chunks(gradient for gradient in gradients if not hasattr(gradient, "to_local"))
        common = _square_terms([*_column_blocks(replicated_rows), *replicated])
        return math.sqrt(math.fsum([*common, *(terms if wait is None else wait())]))


class Lamb(torch.optim.Optimizer):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's direction, scaled to the norm of each parameter tensor.

    The ratio of norms is not transformed (phi is the identity). It is 1 if a norm is 0, as in the authors' code.
    """

    # direction = Adam's mean / (root + eps) + weight_decay * parameter
    # parameter -= lr * |parameter| / |direction| * direction

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> None:
        """Create the optimizer. `sum_over_ranks` sums squared norms of parameters that are sharded over ranks."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._sum_over_ranks = sum_over_ranks

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. `closure` is called first, as in torch.optim."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction = (mean / (1 - beta1**step)).div_(root)
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        of_parameter, of_direction = (global_norm([t], self._sum_over_ranks) for t in (parameter, direction))
        quotient = of_parameter / of_direction if of_parameter > 0 and of_direction > 0 else 1.0
        parameter.add_(direction, alpha=-group["lr"] * quotient)


def set_learning_rates(
    config: RunConfig,
    optimizer: torch.optim.Optimizer,
    step: int,
    num_steps: int,
    num_falls: tuple[int, int] = (0, 0),
) -> float:
    """Set the learning rate of the dense part for `step`, which starts at 0, and return the factor on those of tables.

    `num_falls` has the numbers of (table, dense) reductions of schedule 'plateau' so far.
    """
    factor = learning_rate_factor(config.dense_schedule, step, num_steps, num_falls[1])
    for group in optimizer.param_groups:
        group["lr"] = config.dense.optimizer.lr * factor
    return learning_rate_factor(config.embedding_schedule, step, num_steps, num_falls[0])


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int, num_falls: int = 0) -> float:
    """Return the factor of the learning rate for `step`, which starts at 0.

    As in MLPerf's DLRM, the factor rises linearly to 1 during the warm-up, stays 1 until the decay starts, and then
    decreases. The decay ends at `num_steps` by default, and later steps have `end_factor`.

    Kind 'polynomial' is (1 - progress) ** power, and 'cosine' is (1 + cos(pi * progress)) / 2 (arXiv 1608.03983,
    equation 5, without restarts). Both are scaled to end at `end_factor`. Kind 'step' multiplies by `step_factor` every
    `step_every` steps, and 'plateau' after each of `num_falls` evaluations without progress, both down to `end_factor`.
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


def make_dense_optimizer(
    config: DenseOptimizerConfig, parameters: Iterable[nn.Parameter], sum_over_ranks: SumOverRanks | None = None
) -> torch.optim.Optimizer:
    """Create the optimizer of `config`. Constants missing in `config` have torch's defaults.

    All are bitwise identical for any number of threads. LAMB sums the norms of sharded parameters by `sum_over_ranks`.
    """
    # Fused optimizers are elementwise without atomics, and up to ten times faster on a CPU than the plain ones. Torch
    # has a fused Adagrad for CPUs only. Sharded parameters are a separate group, because torch accepts no list of both
    # kinds.
    all_parameters = list(parameters)
    cut = [parameter for parameter in all_parameters if hasattr(parameter, "to_local")]
    whole = [parameter for parameter in all_parameters if not hasattr(parameter, "to_local")]
    groups = [{"params": group} for group in (cut, whole) if group]
    is_fused = not cut  # Torch has no fused SGD and Adagrad for sharded parameters.
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        form = {"fused": True} if is_fused else {"foreach": False}
        return torch.optim.SGD(groups, momentum=config.momentum, **form, **common)
    if config.eps is not None:
        common["eps"] = config.eps
    if config.name == "adagrad":
        on_cpu = all(parameter.device.type == "cpu" for parameter in all_parameters)
        return torch.optim.Adagrad(groups, fused=on_cpu and is_fused, foreach=None if is_fused else False, **common)
    common["betas"] = (config.beta1, config.beta2)
    if config.name == "adam":
        return torch.optim.Adam(groups, fused=True, **common)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **common)
    return Lamb(groups, sum_over_ranks=sum_over_ranks, **common)


def dense_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a CUDA graph can contain the steps of an optimizer, in `rates_on_device`."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@contextmanager
def rates_on_device(optimizer: torch.optim.Optimizer, scalars: StepScalars) -> Iterator[None]:
    """Context manager in which a fused optimizer reads its learning rates from the numbers of a step on a GPU.

    Rates become float32. A CUDA graph may capture the step of the optimizer.
    """
    groups = optimizer.param_groups
    before: list[dict[str, Any]] = [
        {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
    ]
    for index, group in enumerate(groups):
        # The scalars keep the optimizer, so that no other one gets its id.
        rate = partial(_host_rate, optimizer, index)
        group["lr"] = scalars.view(("learning rate", id(optimizer), index), torch.float32, rate)[0]
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, former in zip(groups, before, strict=True):
            group.update(former)


def _host_rate(optimizer: torch.optim.Optimizer, index: int, _: StepNumbers) -> list[float]:
    return [float(optimizer.param_groups[index]["lr"])]


def keep_former(tensor: Tensor, former: Tensor, found_inf: Tensor) -> None:
    """Restore the `former` content of a tensor if `found_inf`, a device scalar, is nonzero. There is no host sync."""
    tensor.copy_(torch.where(found_inf == 0, tensor, former))


@torch.no_grad()
def _step_adam(optimizer: torch.optim.Optimizer, found_inf: Tensor, accepted: Tensor) -> None:
    """Run a step of a fused Adam or AdamW whose moments exist. `accepted` is 1 - `found_inf`."""
    # Torch's own step first adds 1 to the step counts, and finally subtracts `found_inf` in another kernel.
    update = torch._fused_adamw_ if isinstance(optimizer, torch.optim.AdamW) else torch._fused_adam_
    for group in optimizer.param_groups:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            states = [optimizer.state[parameter] for parameter in parameters]
            steps = [state["step"] for state in states]
            torch.ops.aten._foreach_add_.Tensor(steps, accepted)  # Another overload would read the scalar on the host.
            update(
                parameters,
                [cast(Tensor, parameter.grad) for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                **{name: group[name] for name in ("weight_decay", "eps", "amsgrad", "maximize")},
                found_inf=found_inf,
            )


def step_if_finite(
    optimizer: torch.optim.Optimizer, flags: Float[Tensor, " 2"], scalars: StepScalars | None = None
) -> Callable[[], None]:
    """Run an optimizer step unless `found_inf` is 1. There is no host sync.

    `flags` are the device scalars `found_inf` and 1 - `found_inf`, 0 or 1. If `found_inf` is 1, parameters, moments and
    step counts keep their bits. The returned function undoes the changes that only the host can undo: moments created
    by this step, and step counts on the CPU. Call it once the host knows that `found_inf` was 1. Fused optimizers read
    their rates from `scalars` if given, see `rates_on_device`.
    """
    # Fused optimizers read `found_inf` themselves, as with torch.amp.GradScaler. Other optimizers always step, so their
    # tensors are copied before and restored on the device.
    found_inf, accepted = flags.unbind()
    parameters = dense_parameters(optimizer)
    fresh = [parameter for parameter in parameters if not optimizer.state.get(parameter)]

    def forget_fresh() -> None:
        for parameter in fresh:
            optimizer.state.pop(parameter, None)

    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if is_fused and not any(hasattr(parameter, "to_local") for parameter in parameters):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            with nullcontext() if scalars is None else rates_on_device(optimizer, scalars):
                has_moments = all(parameter.grad is None for parameter in fresh)
                if has_moments and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
                    _step_adam(optimizer, found_inf, accepted)
                else:
                    optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
        return forget_fresh
    lasting = [to_local(parameter.detach()) for parameter in parameters]
    for parameter in parameters:
        moments = optimizer.state.get(parameter, {}).values()
        lasting += [to_local(moment) for moment in moments if isinstance(moment, Tensor)]
    before = [tensor.clone() for tensor in lasting]
    optimizer.step()
    on_host: list[tuple[Tensor, Tensor]] = []
    for tensor, former in zip(lasting, before, strict=True):
        if tensor.device == found_inf.device:
            keep_former(tensor, former, found_inf)
        else:
            on_host.append((tensor, former))

    def undo() -> None:
        forget_fresh()
        for tensor, former in on_host:
            tensor.copy_(former)

    return undo

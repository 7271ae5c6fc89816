"""A user's own model by its import path."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from meseta.jagged import Embeddings, JaggedTensor, KeyedTensor
from meseta.machine.user_code import import_custom
from meseta.models.base import find_dense_forward, loss_term_names
from meseta.models.layers import pooled_dims
from meseta.spec import MesetaError, suggest

CONTRACT_HINT = "see docs/own_model.md for what a model must have"


def make_custom_model(
    path: str, embeddings: nn.Module, *, num_dense: int, labels: Sequence[str], seed: int, options: Mapping[str, Any]
) -> nn.Module:
    """`Class(embeddings, num_dense=..., labels=..., seed=..., **options)` for `path` "module:Class", tried on zeros.

    The module is found as Python finds it, and in the current folder; its files are told before they run. Whatever the
    constructor draws from torch's global generator is a function of `seed`. Raises MesetaError where the module or the
    class cannot be had, where the class is no nn.Module, takes other arguments or keeps no `embeddings`, and where
    `score(dense, pooled)` fails or gives anything but logits [B], or [B, T] for T > 1 labels.
    """
    cls = load_custom_model_class(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _call_custom_code(
            f"model.name {path!r}: the constructor",
            lambda: cls(embeddings, num_dense=num_dense, labels=tuple(labels), seed=seed, **options),
        )
        if getattr(model, "embeddings", None) is not embeddings:
            raise MesetaError(
                f"model.name {path!r}: the constructor must keep the tables that it is given as "
                f"self.embeddings; {CONTRACT_HINT}"
            )
        for batch_size in (2, 1):
            _check_on_zeros(path, model, (batch_size, num_dense), len(labels))
    return model


def load_custom_model_class(path: str) -> type[nn.Module]:
    """The class, whose module is imported. Raises MesetaError where it cannot be had, or cannot be a model."""
    module_name, _, class_name = path.partition(":")
    module = _call_custom_code(
        f"model.name {path!r}: importing {module_name!r}", lambda: _import_module(path, module_name)
    )
    cls = getattr(module, class_name, None)
    if cls is None:
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise MesetaError(
            f"model.name {path!r}: module {module_name!r} has no {class_name!r}; {suggest(class_name, classes)}"
        )
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise MesetaError(f"model.name {path!r}: {class_name!r} is no class of torch.nn.Module; {CONTRACT_HINT}")
    if not callable(getattr(cls, "score", None)):
        raise MesetaError(
            f"model.name {path!r}: class {class_name!r} has no method score(dense, pooled); {CONTRACT_HINT}"
        )
    return cls


def _import_module(path: str, module_name: str) -> ModuleType:
    try:
        return import_custom(f"model.name {path!r}", module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise MesetaError(
            f"model.name {path!r}: there is no module {error.name!r}; write it as package.module:Class, and start "
            "from the folder that holds it, install it, or add its folder to PYTHONPATH"
        ) from None


def _check_on_zeros(path: str, model: nn.Module, shape: tuple[int, int], num_labels: int) -> None:
    """Score zeros of `shape` [B, num_dense], as in evaluation, and look at what comes out."""
    batch_size = shape[0]
    pooled = _zero_embeddings(model, batch_size)
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        before, score = find_dense_forward(model), cast(Any, model).score
    except MesetaError as error:
        raise error.with_prefix(f"model.name {path!r}: ") from None
    on_zeros = f"on {batch_size} samples of zeros,"
    with torch.no_grad():
        logits = [
            _call_custom_code(f"model.name {path!r}: score, {on_zeros}", lambda: score(torch.zeros(shape), pooled))
        ]
        if before is not None:
            x = _call_custom_code(f"model.name {path!r}: forward_dense, {on_zeros}", lambda: before(torch.zeros(shape)))
            of_before = f"model.name {path!r}: score of what forward_dense has returned, {on_zeros}"
            logits.append(_call_custom_code(of_before, lambda: score(x, pooled)))
        if loss_term_names(model):
            label, losses = torch.zeros_like(logits[0]), cast(Any, model).score_with_losses
            of_losses = f"model.name {path!r}: score_with_losses, {on_zeros}"
            logits.append(_call_custom_code(of_losses, lambda: losses(torch.zeros(shape), pooled, label)[0]))
    for module, training in was_training:
        module.training = training
    for found in logits:
        _check_logits(path, found, batch_size, num_labels)


def _zero_embeddings(model: nn.Module, batch_size: int) -> Any:
    """What `score` reads, of zeros: one row of each feature that is not pooled for each sample."""
    embeddings: Any = model.get_submodule("embeddings")
    width = {table.name: table.embedding_dim for table in embeddings.tables}
    dims = {feature.name: width[feature.table] for feature in embeddings.features}
    if not getattr(model, "reads_embeddings", False):
        return torch.zeros(batch_size, sum(pooled_dims(type(model).__name__, embeddings).values()))
    rows = [feature.name for feature in embeddings.features if feature.pooling == "none"]
    pooled = {name: dim for name, dim in dims.items() if name not in rows}
    lengths = torch.ones(batch_size, dtype=torch.int64)
    return Embeddings(
        pooled=KeyedTensor(tuple(pooled), tuple(pooled.values()), torch.zeros(batch_size, sum(pooled.values()))),
        rows={name: JaggedTensor(torch.zeros(batch_size, dims[name]), lengths) for name in rows},
    )


def _check_logits(path: str, logits: Any, batch_size: int, num_labels: int) -> None:
    wanted = (batch_size,) if num_labels == 1 else (batch_size, num_labels)
    if not isinstance(logits, torch.Tensor) or logits.shape != wanted or not logits.is_floating_point():
        found = type(logits).__name__
        if isinstance(logits, torch.Tensor):
            found = f"{str(logits.dtype).removeprefix('torch.')} {list(logits.shape)}"
        raise MesetaError(
            f"model.name {path!r}: score must give floating-point logits {list(wanted)} for {batch_size} samples and "
            f"{num_labels} labels, but gave {found}; {CONTRACT_HINT}"
        )


def _call_custom_code(what: str, call: Callable[[], Any]) -> Any:
    """The result of the user's code, or where and why it failed, in one line."""
    try:
        return call()
    except MesetaError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise MesetaError(
            f"{what} failed with {type(error).__name__}: {error} ({frame.filename}:{frame.lineno}); mend it, or "
            f"{CONTRACT_HINT}"
        ) from error

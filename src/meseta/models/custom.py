"""Custom models, loaded by their import path."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from meseta.models.layers import find_dense_forward, loss_term_names, pooled_dims
from meseta.sparse import Embeddings, JaggedTensor, KeyedTensor
from meseta.spec import MesetaError, suggest
from meseta.system.user_code import import_custom

CONTRACT_HINT = "see docs/own_model.md for what a model must have"


def make_custom_model(
    path: str, embeddings: nn.Module, *, num_dense: int, labels: Sequence[str], seed: int, options: Mapping[str, Any]
) -> nn.Module:
    """Create a custom model from `path` "module:Class", and check it on zeros.

    The constructor is called as `Class(embeddings, num_dense=..., labels=..., seed=..., **options)`. `seed` also seeds
    torch's global generator during the call. The module is imported from Python's path or the current folder. Its files
    are reported before they run.

    Raises MesetaError as `load_custom_model_class` does, if the constructor fails or does not store `embeddings`, or if
    `score(dense, pooled)` fails or does not return logits [B], or [B, T] for T > 1 labels.
    """
    cls = load_custom_model_class(path)
    # The constructor must not change the state of the caller's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _call_custom_code(
            f"model.name {path!r}: the constructor",
            lambda: cls(embeddings, num_dense=num_dense, labels=tuple(labels), seed=seed, **options),
        )
        if getattr(model, "embeddings", None) is not embeddings:
            raise MesetaError(
                f"model.name {path!r}: the constructor must store its argument embeddings as "
                f"self.embeddings; {CONTRACT_HINT}"
            )
        for batch_size in (2, 1):
            _check_on_zeros(path, model, (batch_size, num_dense), len(labels))
    return model


def load_custom_model_class(path: str) -> type[nn.Module]:
    """Import and return the class. Raises MesetaError if that fails or it is not an nn.Module with a method `score`."""
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
        raise MesetaError(f"model.name {path!r}: {class_name!r} is not a subclass of torch.nn.Module; {CONTRACT_HINT}")
    if not callable(getattr(cls, "score", None)):
        raise MesetaError(
            f"model.name {path!r}: class {class_name!r} has no method score(dense, pooled); {CONTRACT_HINT}"
        )
    return cls


def _import_module(path: str, module_name: str) -> ModuleType:
    try:
        return import_custom(f"model.name {path!r}", module_name)
    except ModuleNotFoundError as error:
        # Another module, which the custom module imports, is missing.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise MesetaError(
            f"model.name {path!r}: module {error.name!r} does not exist; write package.module:Class, and start in the "
            "folder of the module, install it, or add its folder to PYTHONPATH"
        ) from None


def _check_on_zeros(path: str, model: nn.Module, shape: tuple[int, int], num_labels: int) -> None:
    batch_size = shape[0]  # `shape` is [B, num_dense].
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
    for result in logits:
        _check_logits(path, result, batch_size, num_labels)


def _zero_embeddings(model: nn.Module, batch_size: int) -> Any:
    # Features without pooling have one row per sample.
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
    expected_shape = (batch_size,) if num_labels == 1 else (batch_size, num_labels)
    if not isinstance(logits, torch.Tensor) or logits.shape != expected_shape or not logits.is_floating_point():
        actual = type(logits).__name__
        if isinstance(logits, torch.Tensor):
            actual = f"{str(logits.dtype).removeprefix('torch.')} {list(logits.shape)}"
        raise MesetaError(
            f"model.name {path!r}: score must return floating-point logits {list(expected_shape)} for {batch_size} "
            f"samples and {num_labels} labels, but returned {actual}; {CONTRACT_HINT}"
        )


def _call_custom_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except MesetaError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise MesetaError(
            f"{what} failed with {type(error).__name__}: {error} ({frame.filename}:{frame.lineno}); fix it, or "
            f"{CONTRACT_HINT}"
        ) from error

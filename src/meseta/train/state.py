"""What a checkpoint holds beside the tables: dense parameters, optimizer moments, positions and windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meseta.spec import MesetaError


def dense_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`model.<parameter>` and `optimizer.<parameter>.<moment>`, flat."""
    tensors = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{moment}"] = torch.as_tensor(value)
    return tensors


def set_dense_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Undo `dense_tensors`. Raises MesetaError where a parameter is missing or has another shape."""
    expected = {f"model.{name}": value for name, value in model.state_dict().items()}
    saved = {name: value for name, value in tensors.items() if name.startswith("model.")}
    for name in sorted(expected.keys() | saved.keys()):
        shapes = [tuple(t[name].shape) if name in t else "nothing" for t in (saved, expected)]
        if shapes[0] != shapes[1]:
            raise MesetaError(
                f"checkpoint: dense tensor {name!r} is {shapes[0]} there and {shapes[1]} in the model; "
                "use the config that it was trained with"
            )
    model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        moments = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if moments:
            # torch keeps its step counters on the CPU unless a GPU asks otherwise; moments follow their parameter.
            optimizer.state[parameter] = {
                key: value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)
                for key, value in moments.items()
            }


def random_state() -> str:
    """torch's CPU generator, as text for the manifest."""
    return bytes(torch.get_rng_state().tolist()).hex()


def set_random_state(text: str) -> None:
    """Undo `random_state`."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8))


def window_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A metric window as dense tensors, since thousands of floats are no matter for JSON."""
    return {f"window.{name}": torch.from_numpy(value) for name, value in state.items()}


def window_state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Undo `window_tensors`."""
    return {
        name.removeprefix("window."): value.numpy() for name, value in tensors.items() if name.startswith("window.")
    }

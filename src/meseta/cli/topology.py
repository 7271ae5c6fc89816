"""`meseta topology detect`: hosts, devices and memories of this machine, as the planner takes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from meseta.machine.ranks import is_first_rank

if TYPE_CHECKING:
    from meseta.measure.topology import DetectedTopology

app = typer.Typer(help="Machines that plans are made for.", no_args_is_help=True)


@app.callback()
def _topology() -> None:
    """Machines that plans are made for."""


@app.command()
def detect(
    out: Annotated[Path | None, typer.Option(help="YAML file to write; else it is printed.")] = None,
    devices_per_host: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a host; else all GPUs, or one for each core.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, a100, h100, h200 or b200; else what is found.")] = None,
    cost_model: Annotated[
        Path | None, typer.Option(help="What `meseta calibrate` wrote, for the links that it measured.")
    ] = None,
    disk: Annotated[Path, typer.Option(help="Folder on the disk that tables may fill.")] = Path(),
) -> None:
    """Look at this machine and write a topology; under torchrun, of all hosts, which are taken as equal."""
    from meseta.errors import check_choice
    from meseta.machine.files import write_atomic
    from meseta.measure.topology import detect_topology as look
    from meseta.measure.topology import find_gpus
    from meseta.spec import CostModel, DeviceKind

    if device is not None:
        check_choice("topology detect", "--device", device, get_args(DeviceKind))
    kind: Any = device
    model = None if cost_model is None else CostModel.load(cost_model)
    gpus = None if device == "cpu" else find_gpus()
    found = look(num_devices=devices_per_host, device=kind, folder=disk, cost_model=model, gpus=gpus)
    if not is_first_rank():
        return
    text = _topology_yaml(found)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_atomic(out, text)
    for note in found.notes:
        typer.echo(note)
    typer.echo(f"wrote {out}")


def _topology_yaml(found: DetectedTopology) -> str:
    """YAML, with the notes as comments."""
    import yaml

    comments = "".join(f"# {note}\n" for note in found.notes)
    return comments + yaml.safe_dump(found.topology.to_dict(), sort_keys=False)

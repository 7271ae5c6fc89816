"""`meseta topology detect`: describes hosts, devices and memories of this machine for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from meseta.system.ranks import is_first_rank

app = typer.Typer(help="Describe hosts and devices for the planner.", no_args_is_help=True)


@app.callback()
def _topology() -> None:
    """Describe hosts and devices for the planner."""


@app.command()
def detect(
    out: Annotated[Path | None, typer.Option(help="YAML file to write. Default: standard output.")] = None,
    devices_per_host: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks per host. Default: number of GPUs, or of cores.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device type: cpu, a100, h100, h200 or b200. Default: detected.")
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(help="YAML file of `meseta calibrate`, for measured link speeds. Default: documented speeds."),
    ] = None,
    disk: Annotated[Path, typer.Option(help="Folder on the disk that tables may use.")] = Path(),
) -> None:
    """Detect the topology of this machine. Under torchrun, describes all hosts and assumes that they are identical."""
    import yaml

    from meseta.errors import check_choice
    from meseta.measure.topology import detect_topology as look
    from meseta.measure.topology import find_gpus
    from meseta.spec import CostModel, DeviceKind
    from meseta.system.files import write_atomic

    if device is not None:
        check_choice("topology detect", "--device", device, get_args(DeviceKind))
    kind: Any = device
    model = None if cost_model is None else CostModel.load(cost_model)
    gpus = None if device == "cpu" else find_gpus()
    detected = look(num_devices=devices_per_host, device=kind, folder=disk, cost_model=model, gpus=gpus)
    if not is_first_rank():
        return
    notes = "".join(f"# {note}\n" for note in detected.notes)
    text = notes + yaml.safe_dump(detected.topology.to_dict(), sort_keys=False)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_atomic(out, text)
    for note in detected.notes:
        typer.echo(note)
    typer.echo(f"wrote {out}")

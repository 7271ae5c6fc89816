"""Checks of the compiled core, GPUs, Triton and NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meseta.measure.doctor.finding import Finding, note, ok, problem
from meseta.measure.doctor.packages import VersionLookup
from meseta.ops.core import InstructionSetError
from meseta.system.kernel import KernelFiles
from meseta.telemetry.formatting import format_bytes

ProbeResult = Mapping[str, Any]


def check_core(fact: ProbeResult) -> Finding:
    """Check that the compiled core loads. `fact` is the result of the probe 'core'."""
    error = fact.get("error")
    if error is None:
        return ok("core", f"the compiled core for {fact['instruction_set']} loads", **fact)
    if "skipped" in fact:
        return note("core", error)
    if fact.get("error_class") == InstructionSetError.__name__:
        return problem("core", error, "unset MESETA_ISA")
    way = "build it: `pip install .` in a clone of the project (after `apt install g++ make python3-dev`)"
    return problem("core", f"the compiled core does not load: {error}", way)


def driver_version(system: KernelFiles) -> str | None:
    """Return the version of the NVIDIA driver, or `None` if it is not loaded."""
    version = system.read("sys/module/nvidia/version")
    if version:
        return version
    words = (system.read_field("proc/driver/nvidia/version", "NVRM version") or "").split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def check_gpu(fact: ProbeResult, torch: ProbeResult, system: KernelFiles) -> Finding:
    """Check the GPUs that torch sees. `fact` and `torch` are the results of the probes 'gpu' and 'torch'."""
    driver = driver_version(system)
    values = {"devices": fact.get("devices", []), "driver": driver}
    if "error" in fact:
        text = f"{fact['error']}{f' (driver {driver})' if driver else ''}"
        if "skipped" in fact:
            return note("GPU", text, **values)
        way = "set device=cpu to train on the CPU; or update the driver, or install a torch build for "
        return problem("GPU", f"a GPU does not work: {text}", way + "the CUDA version that nvidia-smi shows", **values)
    if devices := fact["devices"]:
        each = (
            f"{d['name']}, {format_bytes(d['free_bytes'])} free of {format_bytes(d['total_bytes'])}" for d in devices
        )
        text = "; ".join(f"{index}: {device}" for index, device in enumerate(each))
        return ok("GPU", text + (f"; driver {driver}" if driver else ""), **values)
    if driver is None:
        return ok("GPU", "none; everything runs on the CPU", **values)
    if torch.get("cuda") is None:
        text = f"NVIDIA driver {driver} is loaded, but torch was built without CUDA"
        return note("GPU", text, "install a CUDA build of torch to use the GPU", **values)
    text = f"NVIDIA driver {driver} is loaded, but torch, built for CUDA {torch['cuda']}, sees no GPU"
    way = "check CUDA_VISIBLE_DEVICES; update the driver, or install a torch for the CUDA version that nvidia-smi shows"
    return note("GPU", text, way, **values)


def check_triton(fact: ProbeResult, has_gpu: bool, installed: VersionLookup) -> Finding:
    """Check that Triton compiles a kernel. Only GPUs need it. `fact` is the result of the probe 'triton'."""
    version, error = installed("triton") or fact.get("version"), fact.get("error")
    if error is None:
        where = "and runs a kernel on this GPU" if fact["target"] else "kernels for GPUs; not needed without a GPU"
        return ok("triton", f"{fact['version']} compiles {where}", **fact)
    if "skipped" in fact:
        return note("triton", error, version=version)
    if version is None:
        if not has_gpu:
            return ok("triton", "not installed; not needed without a GPU", version=None)
        return problem("triton", "not installed; training on a GPU needs it", "pip install triton", version=None)
    text = f"{version} does not compile: {error}"
    if not has_gpu:
        return note("triton", f"{text}; not needed without a GPU", version=version)
    way = "apt install gcc python3-dev, make ~/.triton writable (or set TRITON_CACHE_DIR), or set device=cpu"
    return problem("triton", text, way, version=version)


def check_nccl(fact: ProbeResult, num_gpus: int) -> Finding:
    """Check that torch includes NCCL, which several GPUs need. `fact` is the result of the probe 'nccl'."""
    if "error" in fact:
        return note("nccl", fact["error"])
    if fact["version"] is not None:
        return ok("nccl", fact["version"], **fact)
    if num_gpus > 1:
        return problem("nccl", "not in this torch build; training on several GPUs needs it", "install a CUDA build "
                       "of torch for Linux", **fact)  # fmt: skip
    return ok("nccl", "not in this torch build; only several GPUs need it, CPUs use gloo", **fact)

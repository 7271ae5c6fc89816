"""Detected topologies: of a simulated system, of torchrun's variables, of GPUs."""

from pathlib import Path

import pytest

from meseta.measure.topology import GpuInfo, detect_topology
from meseta.planner import documented_cost_model
from meseta.spec import MesetaError
from meseta.system.kernel import KernelFiles
from meseta.system.processors import num_cores


@pytest.fixture
def system(tmp_path: Path) -> KernelFiles:
    """Return a machine with 100,000 kB."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  100000 kB\nMemAvailable: 50000 kB\n")
    return KernelFiles(tmp_path)


def test_a_machine_without_gpus_has_a_rank_for_each_core(system: KernelFiles, tmp_path: Path) -> None:
    topology = detect_topology(system=system, folder=tmp_path, environment={}).topology
    assert (topology.num_hosts, topology.devices_per_host, topology.device) == (1, num_cores(), "cpu")
    assert topology.hbm_bytes == int(102_400_000 * 0.9) // num_cores()
    assert topology.disk_bytes is not None and topology.host_bytes is None and topology.inside is None


def test_a_control_group_limits_the_memory(system: KernelFiles) -> None:
    (system.root / "proc/self").mkdir()
    (system.root / "proc/self/cgroup").write_text("0::/\n")
    group = system.root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, value in (("memory.max", "50000000"), ("memory.current", "0"), ("memory.stat", "inactive_file 0")):
        (group / name).write_text(value)
    detected = detect_topology(num_devices=1, system=system, environment={})
    assert detected.topology.hbm_bytes == 45_000_000
    assert any("control group" in note for note in detected.notes)


def test_torchrun_sets_hosts_and_devices(system: KernelFiles) -> None:
    ranks = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    topology = detect_topology(system=system, environment=ranks).topology
    assert (topology.num_hosts, topology.devices_per_host) == (2, 4)


def test_gpus_have_their_own_memory(system: KernelFiles) -> None:
    gpus = GpuInfo(name="NVIDIA H100 80GB HBM3", count=8, memory_bytes=85_000_000_000)
    topology = detect_topology(gpus=gpus, system=system, environment={}).topology
    assert (topology.device, topology.devices_per_host, topology.hbm_bytes) == ("h100", 8, 85_000_000_000)
    assert topology.host_bytes == int(102_400_000 * 0.9)
    with pytest.raises(MesetaError, match=r"GeForce.*--device"):
        detect_topology(gpus=GpuInfo(name="GeForce 9", count=1, memory_bytes=1), system=system, environment={})


def test_measured_links_are_stored(system: KernelFiles) -> None:
    from dataclasses import replace

    model = documented_cost_model("cpu")
    measured = replace(model, exchange=replace(model.exchange, measured=True, source="a test"))
    detected = detect_topology(system=system, environment={}, cost_model=measured)
    assert detected.topology.inside == model.exchange.inside_all_to_all
    assert detected.notes[-1] == "inside: a test"
    assert detect_topology(system=system, environment={}, cost_model=model).topology.inside is None


def test_a_system_without_memory_information_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="by hand"):
        detect_topology(system=KernelFiles(tmp_path), environment={})

"""The compiled core uses no symbol of torch and only system libraries, and its stub is complete."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

import meseta
from meseta.ops.core import MODULES, core

FORBIDDEN = re.compile(r"torch|c10|_ZN?K?2at|aten_", re.IGNORECASE)  # mangled c10:: and at::
# test_openmp.py tests OpenMP's runtime.
SYSTEM = {
    *("libstdc++", "libc++", "libm", "libgcc_s", "libc", "libpthread", "libdl"),
    *("ld-linux-x86-64", "ld-linux-aarch64"),
}


def core_modules() -> list[Path]:
    specs = [find_spec(name) for name in MODULES.values()]
    return [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]


def output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files with the tools of Linux")


def test_modules_are_there() -> None:
    assert core_modules()


@pytest.mark.parametrize("module", core_modules(), ids=lambda path: path.name.partition(".")[0])
def test_no_symbol_of_torch_is_linked(module: Path) -> None:
    undefined = [line.split()[-1] for line in output("nm", "-D", "--undefined-only", str(module)).splitlines()]
    assert any(name.startswith("Py") for name in undefined)  # the symbols were read
    assert [name for name in undefined if FORBIDDEN.search(name)] == []


@pytest.mark.parametrize("module", core_modules(), ids=lambda path: path.name.partition(".")[0])
def test_only_libraries_of_the_system_are_needed(module: Path) -> None:
    dynamic = output("objdump", "-p", str(module))
    needed = re.findall(r"NEEDED\s+(\S+?)\.so", dynamic)
    assert needed and set(needed) <= SYSTEM, needed
    assert re.findall(r"R(?:UN)?PATH\s+(\S+)", dynamic) == []


@pytest.mark.parametrize("module", core_modules(), ids=lambda path: path.name.partition(".")[0])
def test_symbols_are_no_newer_than_the_wheels_tag(module: Path) -> None:
    tag = re.search(r"^Tag: .*-manylinux_2_(\d+)_", distribution("meseta").read_text("WHEEL") or "", re.MULTILINE)
    # A core that was built on this machine may need its C library.
    newest = int(tag[1] if tag else (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(".")[2])
    required = output("readelf", "--version-info", "--wide", str(module))
    minors = [int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", required)]
    assert minors and max(minors) <= newest, minors
    if tag:
        assert not re.search(r"Name: (?:GLIBCXX|CXXABI)_", required)


def test_the_baseline_loads_without_torch() -> None:
    code = (
        "import sys\n"
        "from meseta.ops.core import baseline_core\n"
        "assert baseline_core().pooled_lookup and 'torch' not in sys.modules\n"
        "assert 'libtorch' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def test_the_stub_names_every_function_and_its_parameters() -> None:
    stub = ast.parse((Path(meseta.__file__).parent / "_C.pyi").read_text())
    declared = {f.name: [a.arg for a in f.args.args] for f in stub.body if isinstance(f, ast.FunctionDef)}
    bound = {name: parameters(name) for name in dir(core()) if not name.startswith("__")}
    assert declared == bound


def parameters(function: str) -> list[str]:
    """Return the parameters of the last overload in nanobind's text. All overloads have the same names."""
    *_, (signature, _, _) = getattr(core(), function).__nb_signature__
    return re.findall(r"[(,] ?(\w+):", signature)

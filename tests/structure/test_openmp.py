"""Torch and the core use one OpenMP runtime, the one that torch ships, under any file name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from small_run import settings, write_config
from source_tree import SOURCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")

# The last line of output lists the mapped files of OpenMP runtimes (GNU's, LLVM's or Intel's).
RUNTIMES = r"""
import json, re, sys
files = {line.split()[-1] for line in open("/proc/self/maps")}
print(json.dumps(sorted(name for name in files if re.search(r"/lib(gomp|omp|iomp)[^/]*\.so", name))))
"""
TRAIN = """
import sys
from meseta.cli.lazy_dynamo import DYNAMO
from meseta.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
loaded = [name for name in sys.modules if name.startswith((DYNAMO + ".", "torch._inductor"))]
assert not loaded, loaded
"""
"""Trains in a new process, which needs neither torch._dynamo nor torch._inductor."""
HASH = """
import sys
import pyarrow
from meseta.data.hash_categories import hash_categories
hash_categories(pyarrow.array(["a", "b"]))
assert "torch" not in sys.modules
"""
# Hides the system's libgomp from this process.
BARE = """
import ctypes
load = ctypes.CDLL
def refuse(name, *args, **kwargs):
    if name == "libgomp.so.1":
        raise OSError("libgomp.so.1: cannot open shared object file")
    return load(name, *args, **kwargs)
ctypes.CDLL = refuse
"""


def run(program: str, *arguments: str, path: Path | None = None, libraries: str = "") -> tuple[int, str, str]:
    """Return (exit code, output, last line of the errors) of a program. Modules in `path` precede the installed ones,
    and `libraries` is an additional folder of system libraries."""
    folders = [str(folder) for folder in (path, SOURCE.parent) if folder is not None]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "LD_LIBRARY_PATH": libraries}
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, "".join(ended.stderr.splitlines()[-1:])


def runtimes(program: str, *arguments: str, path: Path | None = None, libraries: str = "") -> list[str]:
    """Return the files of OpenMP runtimes that are mapped after `program` has run."""
    code, printed, error = run(program + RUNTIMES, *arguments, path=path, libraries=libraries)
    assert code == 0, error
    return json.loads(printed.splitlines()[-1])


def other_torch(folder: Path) -> Path:
    """Create an empty package named torch, and return its parent folder."""
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def runtime() -> str:
    """File of the runtime that torch alone maps."""
    [file] = runtimes("import torch\n")
    return file


def test_train_maps_one_runtime_and_leaves_dynamo_out(runtime: str, tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", settings(tiny, tmp_path / "run"))
    assert runtimes(TRAIN, "train", str(config)) == [runtime]
    assert (tmp_path / "run/report.html").exists()


def test_a_process_without_torch_maps_the_same(runtime: str) -> None:
    assert runtimes(HASH) == [runtime]


@pytest.mark.parametrize("name", ["torch.libs/libgomp-98b21ff3.so.1.0.0", "torch/lib/libgomp-a34b3233.so.1"])
def test_the_runtime_is_found_under_the_names_of_wheels(name: str, runtime: str, tmp_path: Path) -> None:
    file = other_torch(tmp_path) / name
    file.parent.mkdir(exist_ok=True)
    shutil.copy(runtime, file)
    assert runtimes(BARE + HASH, path=tmp_path) == [str(file)]


def test_without_a_runtime_of_torch_it_is_the_systems(runtime: str, tmp_path: Path) -> None:
    shutil.copy(runtime, tmp_path / "libgomp.so.1")
    assert runtimes(HASH, path=other_torch(tmp_path), libraries=str(tmp_path)) == [str(tmp_path / "libgomp.so.1")]


def test_a_missing_runtime_gives_one_line(tmp_path: Path) -> None:
    code, _, error = run(BARE + HASH, path=other_torch(tmp_path))
    assert code == 1
    assert "MesetaError: the compiled core needs GNU's OpenMP runtime" in error and "install torch again" in error

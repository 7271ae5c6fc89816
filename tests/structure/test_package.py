"""The wheel contains every module, type and example, and no source of the core. The sdist contains all that the wheel
is built from."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from source_tree import ROOT, SOURCE

CORE_SOURCES = {".cpp", ".h", ".hpp"}
BUILD_FILES = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", ".gitignore")
OUTPUT_FOLDERS = ("data", "runs", "build")
# Without CMake the core is excluded, and the rest takes a second.
PROGRAM = """
import sys
from scikit_build_core import build
build.build_wheel(sys.argv[1], {"wheel.cmake": "false", "wheel.py-api": "py3"})
build.build_sdist(sys.argv[1])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel, without the core, and the sdist.

    They are built from a copy, because scikit-build-core visits all ignored files of a checkout, such as those of
    .venv.
    """
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("package")
    shutil.copytree(SOURCE.parent, tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples", tree / "examples")
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, tree)
    for name in OUTPUT_FOLDERS:
        (tree / name).mkdir()
        (tree / name / "output").touch()
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


def package_files() -> set[str]:
    """Return the files of the package as 'meseta/...', with sources of the core and without compiled files."""
    paths = (path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".pyc", ".so"})
    return {path.relative_to(SOURCE.parent).as_posix() for path in paths}


def examples() -> set[str]:
    """Return the examples that `meseta config` prints, relative to the folder examples/."""
    files = (path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*.yaml"))
    return {path.as_posix() for path in files if path.parts[0] in {"configs", "schemas"}}


def test_the_wheel_has_every_module_and_no_source_of_the_core(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert "meseta/data/read/reader.py" in packed and "meseta/py.typed" in packed
    modules = {name for name in package_files() if Path(name).suffix not in CORE_SOURCES}
    assert packed == modules | {f"meseta/config/examples/{name}" for name in examples()}


def test_the_sdist_has_all_that_the_wheel_is_built_from(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    needed = {*BUILD_FILES, *(f"src/{name}" for name in package_files()), *(f"examples/{name}" for name in examples())}
    assert needed <= packed, needed - packed
    assert not {name for name in packed if name.startswith(tuple(f"{folder}/" for folder in OUTPUT_FOLDERS))}

"""The wheel contains every module, type and example, and no source of the core. The sdist contains all that the wheel
is built from."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import yaml

import meseta
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


def metadata(built: Path) -> list[Message]:
    """Return the metadata of the wheel and of the sdist."""
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        of_wheel = message_from_bytes(archive.read(name))
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        return [of_wheel, message_from_bytes(file.read())]


def test_the_description_has_no_link_that_an_index_cannot_follow(built: Path) -> None:
    for message in metadata(built):
        assert message["Description-Content-Type"] == "text/markdown"
        text = message.get_payload(decode=True).decode()
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\(([^)]*)\)", prose)
        assert links and all(link.startswith("https://") for link in links)
        # All but the links, the image and its caption is README.
        assert "`meseta verify` checks that" in prose and 'model["head"](model["tables"](ids)' in text
        assert len((ROOT / "README.md").read_text().splitlines()) - len(text.splitlines()) == 5


def test_metadata_for_an_index(built: Path) -> None:
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    for message in metadata(built):
        assert message["Version"] == cited == meseta.__version__
        assert message["Author"] and message["Keywords"] and message["License-Expression"] == "Apache-2.0"
        assert set(message.get_all("Classifier", [])) <= classifiers and message.get_all("Project-URL")


def test_the_sdist_has_all_that_the_wheel_is_built_from(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    needed = {*BUILD_FILES, *(f"src/{name}" for name in package_files()), *(f"examples/{name}" for name in examples())}
    assert needed <= packed, needed - packed
    assert not {name for name in packed if name.startswith(tuple(f"{folder}/" for folder in OUTPUT_FOLDERS))}

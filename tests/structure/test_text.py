"""Tracked files name no machine, so that the project is independent of where it was written.

They name one registry: users need it to choose the build of torch for CPUs.
"""

import subprocess

import pytest

from source_tree import ROOT

# Patterns are in two halves, so that this file passes the test.
PATHS = ["/" + name + "/" for name in ("work", "root", "home", "opt", "Users")]
HOSTS = ["pypi" + ".org", "python" + "hosted.org", "download.py" + "torch.org", "conda." + "anaconda.org"]
CPU_BUILDS = "https://download.py" + "torch.org/whl/cpu"
SUFFIXES = {
    ".py",
    ".pyi",
    ".cpp",
    ".h",
    ".hpp",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".json",
    ".sh",
    ".html",
    ".css",
    ".js",
    "",
}


def tracked() -> list[str]:
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip("not a git checkout: only tracked files are checked")
    return [name for name in run.stdout.splitlines() if (ROOT / name).is_file() and (ROOT / name).suffix in SUFFIXES]


def findings(text: str) -> list[str]:
    return [word for word in PATHS + HOSTS if word in text.replace(CPU_BUILDS, "")]


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    findings_by_file = {
        name: words for name in tracked() if (words := findings((ROOT / name).read_text(errors="replace")))
    }
    assert not findings_by_file


def test_the_rule_bites() -> None:
    assert findings("see /" + "work/x") and findings("pip install --index-url https://pypi" + ".org/simple")
    assert findings(CPU_BUILDS.removesuffix("/cpu")) and not findings(f"pip install torch --index-url {CPU_BUILDS}")
    assert not findings("frame/work, pypi, /usr/bin/python3")

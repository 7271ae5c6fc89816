"""Tests of code in an untrusted folder, or named by an untrusted run: it runs only on request, after a warning."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bad_input.commands import run_here
from meseta.data.prepare import PrepareOptions, prepare
from meseta.system.user_code import import_custom, log_user_code
from small_run import environment, settings, train

MODULE = "strangers_model"
CODE = """
from pathlib import Path
Path(__file__).with_name("ran.txt").touch()
from own_models import Plain
"""


@pytest.fixture(scope="module")
def folder_of_a_stranger(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A module, and a run whose config names it. Tests take a copy."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / f"{MODULE}.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        train(settings(tiny, folder / "run", model={"name": f"{MODULE}:Plain", "embedding_dim": 4}))
    sys.modules.pop(MODULE)
    return folder


@pytest.fixture
def home(folder_of_a_stranger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The copy as current folder. Its module has not been imported."""
    home = Path(shutil.copytree(folder_of_a_stranger, tmp_path / "home"))
    (home / "ran.txt").unlink()
    config = home / "run/config.yaml"
    config.write_text(config.read_text().replace(str(folder_of_a_stranger), str(home)))
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield home
    sys.modules.pop(MODULE, None)


TOPOLOGY = "num_hosts: 1\ndevices_per_host: 2\ndevice: cpu\nhbm_bytes: 8000000000\n"
LOOKS = [
    ("report", "run"),
    ("report", "run", "again", "--out", "page.html"),
    ("checkpoint", "list", "run"),
    ("checkpoint", "inspect", "run"),
    ("checkpoint", "verify", "run"),
    ("checkpoint", "diff", "run", "again"),
    ("checkpoint", "export", "run", "--out", "tensors"),
    ("checkpoint", "export", "run", "--out", "arrays", "--format", "numpy", "--states"),
    ("plan", "check", "run"),
    ("plan", "diff", "run/plan.json", "again/plan.json"),
]


def test_looking_runs_none_of_it(home: Path) -> None:
    shutil.copytree(home / "run", home / "again")
    for command in LOOKS:
        ended = run_here(*command)
        assert ended.code == 0, (command, ended.err)
        assert "runs the code" not in ended.err
        assert not (home / "ran.txt").exists() and MODULE not in sys.modules, command


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "run"),
        ("predict", "run", "--out", "p.parquet"),
        ("train", "run/config.yaml"),
        ("plan", "run/config.yaml", "--topology", "topology.yaml"),  # the plan of its run needs the model
        ("checkpoint", "export", "run", "--out", "program", "--format", "torch-export"),
    ],
)
def test_a_note_names_the_file_before_its_code_runs(command: tuple[str, ...], home: Path) -> None:
    (home / "topology.yaml").write_text(TOPOLOGY)
    (home / f"{MODULE}.py").write_text("import sys\nprint('it runs', file=sys.stderr)\n" + CODE)
    ended = run_here(*command)
    assert ended.code == 0, ended.err
    note = f"note: model.name '{MODULE}:Plain' runs the code in {str(home / f'{MODULE}.py')!r}"
    lines = ended.err.splitlines()
    assert lines.index(note) + 1 == lines.index("it runs")


def test_a_sweep_says_it_before_its_trials(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meseta.cli import sweep

    monkeypatch.setattr(sweep, "_run_training", lambda *_: 1)
    ended = run_here("sweep", "run/config.yaml", "seed=[1, 2]", "--out", "out")
    notes = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: model.name '{MODULE}:Plain' runs the code in {str(home / f'{MODULE}.py')!r}"]
    assert not (home / "ran.txt").exists()


def test_a_note_names_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "outer_package/inner"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "rows.py"):
        file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    log_user_code("row optimizer 'x'", "outer_package.inner.rows")
    files = ", ".join(
        repr(str(tmp_path / "outer_package" / n)) for n in ("__init__.py", "inner/__init__.py", "inner/rows.py")
    )
    assert capsys.readouterr().err == f"note: row optimizer 'x' runs the code in {files}\n"
    assert not [name for name in sys.modules if name.startswith("outer_package")]
    import_custom("row optimizer 'x'", "outer_package.inner.rows")
    assert capsys.readouterr().err
    import_custom("row optimizer 'x'", "outer_package.inner.rows")  # it has run before
    for name in ("no_such_module", "", "a..b", "outer_package.inner.rows.deeper", ".x"):
        log_user_code("it", name)
    monkeypatch.setenv("RANK", "1")
    log_user_code("it", "outer_package")
    assert capsys.readouterr().err == ""


def test_ranks_import_no_modules_of_the_current_folder(tmp_path: Path) -> None:
    """`eval` ends early without a run, but after its ranks have loaded torch."""
    for name in ("torch", "numpy", "typer", "yaml", "json", "signal", "pydantic"):
        (tmp_path / f"{name}.py").write_text("open('ran.txt', 'w').close()\nraise SystemExit(3)\n")
    command = [
        sys.executable,
        "-P",
        "-c",
        "from meseta.cli.main import main; main()",
        "eval",
        "nowhere",
        "--nproc",
        "2",
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=200
    )
    assert done.returncode == 1 and "'nowhere' is not a run" in done.stderr
    assert not (tmp_path / "ran.txt").exists()


NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """Parses a page as a browser does."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attributes))


def test_pages_of_untrusted_runs_have_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are names of columns, tables and metrics, notes of the machine, and the folder's name."""
    draw = np.random.default_rng(0)
    nasty = f"a{NASTY.replace('/', '')}"
    columns = {"label": draw.integers(0, 2, 300), "x": draw.normal(size=300), nasty: draw.integers(0, 9, 300)}
    pq.write_table(pa.table(columns), tmp_path / "raw.parquet")
    options = PrepareOptions(
        sources=[str(tmp_path / "raw.parquet")], out=tmp_path / "data", test_fraction=0.2, hash_rows=10, sparse=[nasty]
    )
    prepare(options)
    run = tmp_path / f"run {NASTY.replace('/', '')}"
    train(settings(tmp_path / "data", run))
    for name in ("config.yaml", "dataset.json", "plan.json", "environment.json", "metrics.jsonl", "summary.json"):
        text = (run / name).read_text()
        # Keys and short values that a page may show.
        text = re.sub(r'"(train|documented for cpu|row_wise|table_wise|lookup|cpu|hash|test)"(?!: *\{)', _quoted, text)
        (run / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    again = shutil.copytree(run, tmp_path / "again")
    for command in (("report", run, "--out", "a.html"), ("report", run, again, "--out", "b.html")):
        ended = run_here(*command)
        assert ended.code == 0, ended.err
        page = Tags()
        page.feed((tmp_path / str(command[-1])).read_text())
        assert len(page.tags) > 30
        assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "embed", "link", "a", "form"}
        assert not [name for _, attributes in page.tags for name, _ in attributes if name.startswith("on")]
    assert "&lt;script&gt;" in (tmp_path / "a.html").read_text()


def _quoted(match: re.Match[str]) -> str:
    if match[1] == "train":  # kind of a line
        return match[0]
    return '"' + NASTY.replace('"', '\\"') + '"'

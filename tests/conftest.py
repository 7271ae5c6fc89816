"""Settings of every test: checked shapes, poisoned memory, one thread, fixed hypothesis examples.

The GPU folder runs on a machine with torch, numpy and pytest alone, so everything else is optional here.
"""

import os

# Ranks and tests share few cores; tests about thread counts set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A thread that waits for another one sleeps, where it else would take the processor from what it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in deterministic mode

import gc
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("jaxtyping") and find_spec("beartype"):
    from jaxtyping import config, install_import_hook

    # A check costs more than most calls. `make test` checks shapes, in the tests of the packages whose signatures have
    # them; mypy holds the other types. `make soak` checks all types in all tests.
    SHAPED = ("data", "embedding", "models", "ops", "pipeline", "sparse", "storage")
    CHECKS_ALL = bool(os.environ.get("MESETA_SOAK")) and os.environ.get("MESETA_SOAK_TYPES") != "0"
    checked = [f"meseta.{'data.read.batch' if package == 'data' else package}" for package in SHAPED]
    install_import_hook(["meseta"] if CHECKS_ALL else checked, "typed.check")

    @pytest.fixture(autouse=True)
    def shape_checks(request: pytest.FixtureRequest) -> None:
        """Shapes are checked in each call, or in none."""
        folder = request.path.relative_to(Path(__file__).parent).parts[0]
        config.update("jaxtyping_disable", not CHECKS_ALL and folder not in (*SHAPED, "structure"))


# Tests compare bits, and a GPU has others: they run on the CPU, but for `pytest tests/gpu`. Workers inherit both.
if not os.environ.setdefault("MESETA_TEST_GPU", "1" if any("tests/gpu" in argument for argument in sys.argv) else ""):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

import sampling
from forked import collect_garbage_rarely

# Without a GPU, Triton's kernels run in its interpreter; this is read when Triton is imported, as torch.compile does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with Ctrl-C ignored, and they hand that on; tests about Ctrl-C need it heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.use_deterministic_algorithms(True)
# Uninitialised memory is filled with NaN and the largest integers, so that reading it cannot go unnoticed.
torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


# Dispatchers of tests store their tokens there, and not in the folders of whoever runs them.
TOKENS = tempfile.TemporaryDirectory(prefix="meseta-tokens-")
os.environ["XDG_RUNTIME_DIR"] = TOKENS.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """pyproject.toml sets `timeout`, which pytest refuses to read where its plugin is missing."""
    if not find_spec("pytest_timeout"):
        parser.addini("timeout", "seconds per test; not enforced without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Few examples in `make test`, many in `make soak`; the same ones every time."""
    sampling.leaves_soak_out = config.option.markexpr == "not soak"
    if os.environ.get("MESETA_SOAK"):  # beartype asks it, in threads beside a property test
        config.addinivalue_line("filterwarnings", "ignore:Do not use the .random. module")
    if find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        common = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
        settings.register_profile("test", max_examples=25, **common)
        settings.register_profile("soak", max_examples=200, **common)
        settings.load_profile("soak" if os.environ.get("MESETA_SOAK") else "test")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are processors: tests wait for a third of their time, most of all for processes to start."""
    from meseta.system.processors import num_cores

    return num_cores() + 2


LONGEST = ("docs/test_pages.py", "cli", "train", "distributed", "bad_input", "checkpoint", "data/service")
"""Tests below these paths begin first, so that no long one is left alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files keep their order otherwise."""
    here = Path(__file__).parent
    ranks = {here / path: rank for rank, path in enumerate(LONGEST)}

    def rank(item: pytest.Item) -> int:
        return min((ranks[path] for path in (item.path, *item.path.parents) if path in ranks), default=len(ranks))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect tests without garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        collect_garbage_rarely()
        gc.enable()


def pytest_report_header() -> str:
    """Which processor: what is equal on one instruction set may differ on another."""
    from meseta.ops.core import instruction_set
    from meseta.system.processors import read_processor

    processor = read_processor()
    return f"processor: {processor.name}, products by {processor.instruction_set()}, the core's {instruction_set()}"


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Each test starts from the same torch seed and leaves the deterministic mode as it found it."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared dataset of `small_run.tiny_data`; tests only read it."""
    from small_run import tiny_data

    return tiny_data(tmp_path_factory.getbasetemp() / "data")

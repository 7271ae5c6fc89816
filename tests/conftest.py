"""Settings of all tests: checked shapes, poisoned memory, one thread, fixed hypothesis examples.

The GPU tests run on a machine with only torch, numpy and pytest, so all other packages are optional here.
"""

import os

# Ranks and tests share few cores; tests about thread counts set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A waiting thread sleeps. Otherwise it would take the processor from the thread that it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it in deterministic mode

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
    if CHECKS_ALL:
        install_import_hook(["meseta"], "typed.check")
    else:
        install_import_hook(checked, "typed.check_shapes")

    @pytest.fixture(autouse=True)
    def shape_checks(request: pytest.FixtureRequest) -> None:
        """Check shapes in each call of a test, or in none."""
        folder = request.path.relative_to(Path(__file__).parent).parts[0]
        config.update("jaxtyping_disable", not CHECKS_ALL and folder not in (*SHAPED, "structure"))


# Tests compare bits, which differ on a GPU, so only `pytest tests/gpu` uses it. Workers inherit both variables.
if not os.environ.setdefault("MESETA_TEST_GPU", "1" if any("tests/gpu" in argument for argument in sys.argv) else ""):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

import sampling
from forked import collect_garbage_rarely

# Without a GPU, Triton's kernels run in its interpreter; this is read when Triton is imported, as torch.compile does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Background jobs of a shell ignore Ctrl-C, and their children inherit that. Tests of Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.use_deterministic_algorithms(True)
# Uninitialised memory is filled with NaN and the largest integers, so that reading it cannot go unnoticed.
torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


# Dispatchers of tests store their tokens there, and not in the user's folders.
TOKENS = tempfile.TemporaryDirectory(prefix="meseta-tokens-")
os.environ["XDG_RUNTIME_DIR"] = TOKENS.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """Define the ini option `timeout` if its plugin is missing, because pytest refuses unknown options."""
    if not find_spec("pytest_timeout"):
        parser.addini("timeout", "seconds per test; not enforced without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Draw few examples in `make test` and many in `make soak`, always the same."""
    sampling.leaves_soak_out = config.option.markexpr.startswith("not soak")
    if os.environ.get("MESETA_SOAK"):  # beartype uses it in threads of property tests
        config.addinivalue_line("filterwarnings", "ignore:Do not use the .random. module")
    if find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        common = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
        settings.register_profile("test", max_examples=25, **common)
        settings.register_profile("soak", max_examples=200, **common)
        settings.load_profile("soak" if os.environ.get("MESETA_SOAK") else "test")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processors plus two, because tests wait for a third of their time."""
    from meseta.system.processors import num_cores

    return num_cores() + 2


LONGEST = ("docs/test_pages.py", "cli", "train", "distributed", "bad_input", "checkpoint", "data/service")
"""Tests below these paths start first, so that no long test runs alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by `LONGEST`, and keep the order of files otherwise."""
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
    """Report the processor, as bits may differ between instruction sets."""
    from meseta.ops.core import instruction_set
    from meseta.system.processors import read_processor

    processor = read_processor()
    return f"processor: {processor.name}, products by {processor.instruction_set()}, the core's {instruction_set()}"


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Start each test from the same torch seed, and restore the deterministic mode after it."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared dataset of `small_run.tiny_data`; tests only read it."""
    from small_run import tiny_data

    return tiny_data(tmp_path_factory.getbasetemp() / "data")

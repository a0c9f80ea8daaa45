"""Settings that every test runs under: several CPU devices, strict dtype promotion."""

import gc
import importlib
import itertools
import os
import re
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The tests compile thousands of small programs that run once. With LLVM's optimizations, compilation would take most of
# the time. The last option chooses the older code generators of jaxlib 0.10, which take less than half the time; jaxlib
# 0.12 ignores it.
FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")

# `python -m pytest` without arguments runs the tests that match this expression. In an expression after -m, the word
# `core` stands for it. It leaves out slow tests and tests that need other packages.
CORE = " and ".join(
    f"not {marker}"
    for marker in ("slow", "every_pair", "checkers", "frameworks", "ecosystem", "notebooks", "generated")
)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests that a bare `python -m pytest` leaves out, too")
    parser.addoption(
        "--require-frameworks",
        action="store_true",
        help="fail where real Paddle or torch, or pyright, is absent, instead of skipping",
    )
    parser.addoption(
        "--require-ecosystem",
        action="store_true",
        help="fail where flax, equinox or another library of tests/integrations is absent, instead of skipping",
    )


def pytest_configure(config):
    chosen = config.option.markexpr or config.option.keyword or config.args_source is config.ArgsSource.ARGS
    if not chosen and not config.option.all:
        config.option.markexpr = CORE
    config.option.markexpr = re.sub(r"\bcore\b", f"({CORE})", config.option.markexpr)


# Here, of a test with ten cases or more, each fourth is in the core, and the others run with `every_pair`.
MANY_CASES = ("hooks/", "derivatives/", "devices/", "layers/test_transforms", "contract/test_vmap")
MANY_CASES += ("contract/test_host_layers", "contract/test_report")


def pytest_collection_modifyitems(items):
    for function, cases in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(cases)
        if len(cases) >= 10 and function.removeprefix("tests/").startswith(MANY_CASES):
            for i, item in enumerate(cases):
                if i % 4:
                    item.add_marker(pytest.mark.every_pair)
    # Tests that clear JAX's caches run last, because each later test would have to compile its programs again.
    items.sort(key=lambda item: item.get_closest_marker("clears_caches") is not None)


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap():
    """Freeze the heap, so that `gc.collect()` in a test does not walk over what JAX has cached for other tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def framework(request):
    """Return a function that imports Paddle, torch or pyright by name.

    If the package is absent, it skips the test, or fails it under --require-frameworks.
    """

    def load(name):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if request.config.getoption("--require-frameworks"):
                pytest.fail(f"{name} is required, but: {error}")
            extra = "lint" if name == "pyright" else "frameworks"
            pytest.skip(f'{name} is not installed: pip install -e ".[{extra}]"')

    return load


@pytest.fixture
def paddle(framework):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return framework("paddle")

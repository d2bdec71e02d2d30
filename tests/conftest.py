"""What every test stands on: the same options, threads and checks on every machine."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The developer's own settings must not decide what is tested; who follows is asked for. Before anything reads them.
for name in [name for name in os.environ if name.startswith("FUSED_EAGER_") and name != "FUSED_EAGER_FOLLOWER"]:
    del os.environ[name]
os.environ["FUSED_EAGER_VALIDATE"] = "1"
# The compiled follower is built once for the developer's cache folder, not for each test process.
from fused_eager.follower import build  # noqa: E402

if not build.obstacle():
    build.build(patiently=False)
# What is compiled must not depend on what was compiled before; tests of the cache open one of their own. And whoever
# forgets to name a folder for it gets one that is not the developer's.
os.environ["FUSED_EAGER_CACHE"] = "off"
_CACHE_HOME = tempfile.TemporaryDirectory(prefix="fused-eager-tests-")
build.lend(Path(_CACHE_HOME.name, "fused_eager"))
os.environ["XDG_CACHE_HOME"] = _CACHE_HOME.name
# Which way is faster differs from run to run; tests of the choice make it themselves.
os.environ["FUSED_EAGER_NATIVE"] = "never"
# When the compiler is done differs too; tests of the background ask for it.
os.environ["FUSED_EAGER_COMPILE"] = "wait"
# Two spinning thread pools on two cores stall each other for milliseconds at a time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from itertools import count  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from fused_eager.compiling import mappings  # noqa: E402
from fused_eager.executing import load  # noqa: E402
from fused_eager.frontends.context import bypass, parking  # noqa: E402
from fused_eager.policy.allowance import ALLOWANCE  # noqa: E402

from .durations import pytest_terminal_summary  # noqa: E402, F401 - a hook of pytest's
from .known_gaps import reason_for  # noqa: E402
from .services.chromium import Browser  # noqa: E402
from .services.programs import command  # noqa: E402
from .thinning import thin  # noqa: E402

torch.set_num_threads(1)
# What tests compile themselves is for the device that regions are for, on machines with a GPU as well.
if jax.default_backend() != "cpu":
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
# For a device that is not there, each seed queues a call with the text of its stack, for ever: of the op corpus, whose
# samples are seeded thousands of times, they took a quarter of the time.
for module in (torch.cuda, torch.xpu, torch.mtia):
    if not module.is_available():
        module.manual_seed_all = lambda seed: None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run one in N of the tests that are not slow")


def pytest_collection_finish() -> None:
    """What is there now stays: a collection need not go through the modules of torch and jax again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the known gaps, and leave to the full run the semantics' thousands of programs in the slower modes, and most
    of what is `thinned`. With `--one-in`, keep a part of what is left."""
    thin(items)
    for item in items:
        reason = reason_for(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
        if "tests/semantics/" in item.nodeid and ("[debug" in item.nodeid or "[strict" in item.nodeid):
            item.add_marker(pytest.mark.slow)
    part = config.getoption("--one-in")
    if part > 1:
        _keep_one_in(part, config, items)


def _keep_one_in(part: int, config: pytest.Config, items: list[pytest.Item]) -> None:
    """One test of `part` that follow each other, and so of each large file and of each test with many parameters."""
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    kept = [item for number, item in enumerate(quick) if number * 0.618034 % 1 < 1 / part]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written down must not depend on how long that takes; tests of the allowance have one of their own."""
    monkeypatch.setattr(ALLOWANCE, "saved", float("inf"))
    monkeypatch.setattr(ALLOWANCE, "purse", float("inf"))
    monkeypatch.setattr(ALLOWANCE, "resting", False)


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor at which turn a front door comes back, on how fast turns come: each of them is looked at."""
    monkeypatch.setattr(bypass, "GLANCE", 0.0)


@pytest.fixture(autouse=True)
def nothing_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor how often a line has entered contexts: tests of that set it themselves."""
    parking.clear()
    monkeypatch.setattr(parking, "AGAIN", float("inf"))


_TESTS = count(1)


@pytest.fixture(autouse=True)
def room() -> None:
    """Executables of thousands of tests are forgotten between two of them, not in the middle of one that counts: JAX's
    own, too, which hold as much memory, and half of all objects that the collector goes through."""
    if next(_TESTS) % 8 == 0 and mappings.beyond(mappings.SHARE / 2):
        load.forget()
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, for the tests of a module."""
    if command("chromium") is None:
        pytest.skip("chromium is not there (make test-services gets it)")
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found

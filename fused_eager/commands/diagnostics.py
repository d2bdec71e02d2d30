"""Looking: what `doctor` found on this machine. Nothing is judged here, and what fails is a fact as well."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fused_eager.cache import LocalStore, default_root, open_store
from fused_eager.fusion_rules.cores import usable_cores

from ..config import OptionError, resolve

_PACKAGES = ("fused-eager", "torch", "jax", "jaxlib", "numpy")
_VARIABLES = re.compile(r"(FUSED_EAGER|JAX|XLA|OMP|GOMP|KMP|MKL|MALLOC)_\w*|CUDA_VISIBLE_DEVICES|PYTORCH_ALLOC_CONF")
_CPU_FEATURES = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found. Versions are None where the package is missing; `failures` maps what was tried to its error."""

    python: str = ""
    implementation: str = "CPython"
    gil: bool = True
    system: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    jaxlib_wanted: str = ""  # jax's own requirement, such as "jaxlib<=0.10.2,>=0.10.1"
    cores: int = 1
    cpu_features: tuple[str, ...] = ()
    torch_devices: tuple[str, ...] = ()
    torch_cpu: str = ""  # the instruction set that ATen's kernels chose
    torch_threads: int = 1
    torch_openmp: bool = False
    jax_devices: tuple[str, ...] = ()
    jax_x64: bool = False
    follower: str = ""  # what became of the compiled one
    follower_obstacle: str = ""  # why there can be none
    cache: tuple[str, ...] = ()
    cache_problem: str = ""
    cache_keys: bool = True  # shared stores have keys to believe them by, or are believed without
    options: str = ""  # what is wrong with one
    environment: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)  # what keeps each from working, "" where nothing does
    failures: Mapping[str, str] = field(default_factory=dict)


def _torch_facts() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        devices += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return {
        "torch_devices": tuple(devices),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "torch_openmp": torch.backends.openmp.is_available(),
    }


def _jax_facts() -> dict[str, Any]:
    # Looking must not take the GPU's memory; this process needs none of it, so its own setting is free.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = importlib.import_module("jax")
    devices = tuple(f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.local_devices())
    return {"jax_devices": devices, "jax_x64": bool(jax.config.jax_enable_x64)}


def _trap_facts() -> dict[str, Any]:
    # Without the trap a read that nothing intercepts would return memory that nobody has written yet.
    problem = importlib.import_module("fused_eager.devices.host.trap").self_test()
    if problem:
        raise RuntimeError(problem)
    return {}


def _follower_facts() -> dict[str, Any]:
    build = importlib.import_module("fused_eager.follower.build")
    why = build.obstacle()
    missing = "cannot be built" if why else "will be built for the first program that runs for ten seconds"
    return {"follower": "built" if build.is_built() else missing, "follower_obstacle": why}


def _fusing_facts() -> dict[str, Any]:
    """Three ops, as any program's: with a JAX that is newer than this library regions may not compile, and nothing says
    so but a program's report, for they run natively then."""
    torch = importlib.import_module("torch")
    explaining = importlib.import_module("fused_eager.reporting.explaining")
    context = importlib.import_module("fused_eager.frontends.context.context")
    with (
        explaining.watching() as seen,
        context.fused_eager(mode="fused", compile="wait", native="never", cache="off", islands="allow"),
    ):
        result = (torch.arange(8.0) * 2 + 1).tolist()
    failed = [event.data for event in seen if event.kind in ("compile-failed", "island")]
    if failed:
        raise RuntimeError(f"not compiled: {failed[0].get('error') or failed[0]['reason']}")
    if result != [2.0 * i + 1 for i in range(8)]:
        raise RuntimeError(f"arange(8) * 2 + 1 is {result}")
    return {}


def _feature_facts() -> dict[str, Any]:
    return {"features": importlib.import_module("fused_eager.commands.features").obstacles()}


def _cache_facts() -> dict[str, Any]:
    config = resolve()
    tiers = tuple(tier.strip() for tier in config.cache.split(",") if tier.strip())
    if tiers == ("off",):
        return {"cache": tiers}
    try:
        stores = [open_store(tier) for tier in tiers if urlsplit(tier).scheme in ("", "file")]  # others are not asked
    except ValueError as error:
        raise OptionError(f"option 'cache': {error}") from error
    if config.cache_bytes:
        stores.insert(0, LocalStore(config.cache_dir or None))
        tiers = (config.cache_dir or str(default_root()), *tiers)
    believed = bool(not config.cache or config.cache_keys or config.cache_unsigned)
    # The store's own answer: what keeps it from working is more than a permission.
    problems = [str(why) for store in stores if isinstance(store, LocalStore) and (why := store.obstacle())]
    shown = tuple(redact(tier) for tier in tiers)
    return {"cache": shown, "cache_problem": "; ".join(problems), "cache_keys": believed}


def redact(text: str) -> str:
    """`text` without the user and password of URLs: what doctor prints is meant to be published."""
    return re.sub(r"://[^/@\s]*@", "://***@", text)


def _cpu_features() -> tuple[str, ...]:
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return tuple(name for name in _CPU_FEATURES if name in flags)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gather() -> Facts:
    """Look at this process and machine. Imports torch and jax; what raises becomes one of `failures`."""
    # First of all, so that it is the user's environment and not what importing jax or we ourselves made of it.
    environment = {name: redact(os.environ[name]) for name in sorted(os.environ) if _VARIABLES.fullmatch(name)}
    versions = {name: _version(name) for name in _PACKAGES}
    wanted = importlib.metadata.requires("jax") or [] if versions["jax"] else []
    known: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for what, look in (
        ("torch", _torch_facts),
        ("jax", _jax_facts),
        ("storage trap", _trap_facts),
        ("fusing", _fusing_facts),
        ("compiled follower", _follower_facts),
        ("features", _feature_facts),
        ("options", _cache_facts),
    ):
        try:
            known.update(look())
        except OptionError as error:
            known["options"] = redact(str(error))
        except Exception as error:  # a doctor reports what fails and goes on
            failures[what] = redact(f"{type(error).__name__}: {error}")
    return Facts(
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        gil=getattr(sys, "_is_gil_enabled", lambda: True)(),
        system=platform.platform(),
        versions=versions,
        jaxlib_wanted=next((line for line in wanted if re.match(r"jaxlib\b(?!.*extra)", line)), ""),
        cores=usable_cores(),
        cpu_features=_cpu_features(),
        environment=environment,
        failures=failures,
        **known,
    )

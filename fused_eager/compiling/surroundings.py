"""Surroundings: everything besides the region that its machine code depends on, as named parts of a key.

Too much in a key costs a compilation, too little a wrong number: what is in doubt is in.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxlib
import torch

from fused_eager import fusion_rules
from fused_eager.cache import Key, Origin, Unencodable
from fused_eager.fusion_rules.cores import usable_cores
from fused_eager.fusion_rules.deferred import Deferred, jax, xla_client
from fused_eager.fusion_rules.precision import switches

from .. import lowering, xla
from ..devices.device import Device
from ..devices.host.device import HOST
from ..planning import donation, forms, order, room
from ..targets import topology
from . import canonical, executable
from . import compile as compiling
from .xla_cpu import finishing, strip, subprocess_compiler, xla_process

_lib = Deferred("jax._src.lib")

# JAX's options that change what is traced or how XLA compiles it.
_JAX_OPTIONS = (
    "jax_allow_f16_reductions",
    "jax_cpu_collectives_implementation",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_legacy_prng_key",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_num_cpu_devices",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_optimization_level",
    "jax_pjrt_client_create_options",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
    "jax_use_direct_linearize",
    "jax_xla_profile_version",
)


@functools.cache
def lowering_digest() -> str:
    """64 hex digits that stand for the code that turns a region into a JAX function.

    Raises:
        Unencodable: the source is not there to be read.
    """
    packages, modules = (fusion_rules, lowering), (
        *(canonical, compiling, donation, executable, finishing, forms, order, room, strip, subprocess_compiler, xla),
        xla_process,
    )
    files: dict[Path, str] = {}
    for package in packages:
        folder = Path(package.__file__ or "").parent
        files.update({path: f"{package.__name__}/{path.relative_to(folder)}" for path in folder.rglob("*.py")})
    files.update({path: path.name for path in (Path(module.__file__ or "") for module in modules)})
    total = hashlib.sha256(b"fused-eager/lowering/1\0")
    try:
        for path, name in sorted(files.items(), key=lambda item: item[1]):
            total.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    except OSError as error:
        raise Unencodable("lowering", f"the library's own source cannot be read: {error}") from error
    return total.hexdigest()


@functools.cache
def cpu() -> Mapping[str, Any]:
    """This machine's processor, as XLA tunes for it: architecture, model, instruction sets.

    Raises:
        Unencodable: the system does not tell.
    """
    rows: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        raise Unencodable("cpu", f"the processor's features are unknown here: {error}") from error
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        rows[name.strip()] = value.strip()
    features = rows.get("flags", rows.get("Features", ""))
    if not features:
        raise Unencodable("cpu", "/proc/cpuinfo names no features")
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    return {
        "architecture": platform.machine(),
        "model": " ".join(rows[name] for name in names if name in rows),
        "features": sorted(set(features.split())),
    }


# The options among them that have to do with the host's processor, and what JAX itself sets on a host with a TPU.
_HOST_OPTIONS = ("jax_cpu_collectives_implementation", "jax_num_cpu_devices")
_CREATES = "jax_pjrt_client_create_options"
_JAX_ADDS = "--xla_tpu_use_enhanced_launch_barrier=true"


def _set_by_jax(option: str) -> str | None:
    return f"ml_framework_name:JAX;ml_framework_version:{jax.__version__}" if option == _CREATES else None


def _is_accelerator(device: Any) -> bool:
    """Whether a device of JAX's has code of its own alone, so that the host's processor does not matter."""
    return device.platform != "cpu"


@functools.cache
def _of_process(device: Any = None) -> Mapping[str, Any]:
    """What is fixed once XLA has started, for one of JAX's devices, here or of a target; the CPU if none is named."""
    device = device or xla.device()
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "torch": str(torch.__version__),
        "lowering": lowering_digest(),
        "backend": {
            "platform": device.platform,
            "version": device.client.platform_version,
            "device": device.device_kind,
        },
        **(_of_accelerator(device) if _is_accelerator(device) else _of_processor()),
        # The flags in words, and what XLA made of them when it read them.
        "xla_flags": " ".join(os.environ.get("XLA_FLAGS", "").split()),
        "xla_options": hashlib.sha256(xla_client.CompileOptions().SerializeAsString()).hexdigest(),
    }


def _of_processor() -> dict[str, Any]:
    # XLA cuts loops for the threads it has.
    return {"cpu": cpu(), "threads": {"cores": usable_cores(), "NPROC": os.environ.get("NPROC", "")}}


def _of_accelerator(device: Any) -> dict[str, Any]:
    if device.platform != "tpu":
        return {"chip": getattr(device, "compute_capability", ""), "libraries": _libraries()}
    flags = set(os.environ.get("LIBTPU_INIT_ARGS", "").split()) - {_JAX_ADDS}
    return {"topology": topology.bounds(device.client.devices()), "libtpu_flags": sorted(flags)}


def _libraries() -> dict[str, int]:
    """The versions of NVIDIA's libraries, whose choices of kernels are compiled in; none on other platforms."""
    found = getattr(_lib, "cuda_versions", None)
    if found is None:
        return {}
    asked = {name: getattr(found, f"{name}_get_version", None) for name in _NVIDIAS}
    return {name: int(version()) for name, version in asked.items() if version is not None}


_NVIDIAS = ("cublas", "cudnn", "cufft", "cusolver", "cusparse")


def parts(bounds: bool, salt: str, device: Device = HOST) -> dict[str, Any]:
    """The named parts of a key besides the region: as `Config.check_bounds` and `Config.cache_salt` say, and now.

    They are the same for all devices of a kind, and for a target of that kind.

    Raises:
        Unencodable: something here cannot be told from what another machine may have.
    """
    options = {}
    for name in _JAX_OPTIONS:
        value = getattr(jax.config, name, None)
        value = value.value if isinstance(value, enum.Enum) else value
        if value is not None and type(value) not in (bool, int, float, str):
            raise Unencodable(f"numerics.{name}", f"{value!r:.60} has no canonical form")
        if value:
            options[name] = value
    if not device.has_memory and _is_accelerator(device.xla):
        options = {k: v for k, v in options.items() if k not in _HOST_OPTIONS and v != _set_by_jax(k)}
    return {
        **_of_process(None if device.has_memory else device.xla),
        **({} if device.has_memory else {"memory": "device"}),  # no argument is scratch memory of the host's
        "format": executable.FORMAT,
        "numerics": {**dict(switches()), **options, "default_dtype": str(torch.get_default_dtype())},
        "check_bounds": bounds,
        "salt": salt,
    }


def differing_numerics(a: Key, b: Key) -> list[str]:
    """What two keys, of whatever devices, were asked for differently: torch's switches and JAX's options, in words."""
    first, second = a.parts["numerics"], b.parts["numerics"]
    names = sorted({*first, *second} - {*_HOST_OPTIONS, _CREATES})
    return [f"{n} {first.get(n)} and not {second.get(n)}" for n in names if first.get(n) != second.get(n)]


def of_choice(salt: str, torch_threads: int, followed_in: str) -> dict[str, Any]:
    """The named parts of the key of a choice besides the regions, whose own keys say which options they were made with.

    How fast ATen is depends on its threads, and how fast ops are recorded on who follows them. Raises Unencodable as
    `parts` does.
    """
    found = _of_process()
    threads = {**found["threads"], "torch": torch_threads}
    return {**found, "threads": threads, "follower": followed_in, "salt": salt}


def origin() -> Origin:
    """This machine, for entries to name and to be compared with. Raises Unencodable as `parts` does."""
    here = cpu()
    return Origin(here["model"][:200], xla.device().device_kind, tuple(here["features"]))


def origin_of(key: Key) -> Origin:
    """What the entry of a key names instead: code for a device apart from the processor suits any host of it."""
    here = origin()
    if "cpu" in key.parts or "backend" not in key.parts:
        return here
    return Origin(here.host_class, key.parts["backend"]["device"])


def versions() -> dict[str, str]:
    """Of the libraries, for people who look at an entry."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "torch": str(torch.__version__)}

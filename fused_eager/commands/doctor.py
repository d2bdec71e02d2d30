"""`doctor`: what this library found on this machine, and which known-bad combinations that makes.

`diagnostics` judges nothing; `CHECKS` judges and looks at nothing but the `Facts`. A known-bad combination is one
row. A finding is a value; what prints it, as text for a bug report or as JSON, comes last.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from .diagnostics import Facts, gather
from .features import FEATURES, Feature

Severity = Literal["error", "warning", "note"]

# The newest that all tests have run with.
TESTED = {"torch": (2, 14, 1), "jaxlib": (0, 12, 0)}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know about this machine: a stable code, how bad it is, what it is, and what to do about it."""

    code: str
    severity: Severity
    text: str
    cure: str


@dataclass(frozen=True, slots=True)
class Check:
    """One known-bad combination. `holds` says in words how the facts show it, or returns None."""

    code: str
    severity: Severity
    holds: Callable[[Facts], str | None]
    cure: str


def version_of(text: str | None) -> tuple[int, ...]:
    """The release numbers in front of a version: "2.13.0+cpu" gives (2, 13, 0); () for None."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _missing(facts: Facts) -> str | None:
    names = [name for name, version in facts.versions.items() if version is None and name != "fused-eager"]
    return f"not installed: {', '.join(names)}" if names else None


def _failed(facts: Facts) -> str | None:
    return "; ".join(f"{what}: {error}" for what, error in facts.failures.items()) or None


def _old_torch(facts: Facts) -> str | None:
    version = facts.versions.get("torch")
    return f"torch is {version}" if version and version_of(version) < (2, 11) else None


def _untested(facts: Facts) -> str | None:
    """Of one more release than has been seen: 0.12.1 after 0.12.0 is none."""
    newer = [
        f"{name} is {facts.versions[name]}, the tests have run with {'.'.join(map(str, tested))}"
        for name, tested in TESTED.items()
        if version_of(facts.versions.get(name))[:2] > tested[:2]
    ]
    return "; ".join(newer) or None


def _jaxlib_mismatch(facts: Facts) -> str | None:
    have = version_of(facts.versions.get("jaxlib"))
    limits = re.findall(r"(<=|>=|==)\s*([\d.]+)", facts.jaxlib_wanted)
    holds = {"<=": have.__le__, ">=": have.__ge__, "==": have.__eq__}
    if not have or all(holds[sign](version_of(limit)) for sign, limit in limits):
        return None
    return f"jax {facts.versions.get('jax')} wants {facts.jaxlib_wanted}; jaxlib is {facts.versions.get('jaxlib')}"


def _spinning(facts: Facts) -> str | None:
    policy = facts.environment.get("OMP_WAIT_POLICY", "")
    if not facts.torch_openmp or facts.torch_threads < 2 or policy.upper() == "PASSIVE":
        return None
    words = f"is {policy}" if policy else "is not set"
    return f"torch has {facts.torch_threads} OpenMP threads and OMP_WAIT_POLICY {words}: they spin while XLA computes"


def _oversubscribed(facts: Facts) -> str | None:
    if facts.torch_threads <= facts.cores:
        return None
    return f"torch has {facts.torch_threads} threads on {facts.cores} usable cores"


def _xla_flag(flag: str, why: str = "") -> Callable[[Facts], str | None]:
    """Holds where XLA_FLAGS has flags of this pattern; `why` is said after them."""

    def holds(facts: Facts) -> str | None:
        found = re.findall(rf"{flag}(?=\s|$)", facts.environment.get("XLA_FLAGS", ""), re.IGNORECASE)
        return f"XLA_FLAGS has {' '.join(found)}{why}" if found else None

    return holds


_fast_math = _xla_flag(r"--xla_(?:cpu|gpu)_enable_fast_(?:math|min_max)(?:=(?:true|1))?")
_wide_vectors = _xla_flag(
    "--xla_cpu_prefer_vector_width=512", ": XLA's arc tangent is wrong by up to 3 with it (jaxlib 0.10.2)"
)


def _set(name: str, *harmless: str) -> Callable[[Facts], str | None]:
    """Holds where the environment variable `name` is set to something that is not `harmless`."""

    def holds(facts: Facts) -> str | None:
        value = facts.environment.get(name, "")
        return f"{name}={value}" if value and value.lower() not in harmless else None

    return holds


def _x64(facts: Facts) -> str | None:
    return "JAX's 64-bit types are switched on for the whole process (JAX_ENABLE_X64)" if facts.jax_x64 else None


def _has_gpu(devices: tuple[str, ...]) -> bool:
    return any(device.startswith(("cuda", "rocm", "gpu", "xpu")) for device in devices)


def _preallocation(facts: Facts) -> str | None:
    value = facts.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    if not _has_gpu(facts.jax_devices) or value.lower() in ("false", "0"):
        return None
    return "JAX code of yours that uses the GPU takes three quarters of its memory; this library takes none"


def _not_fused(facts: Facts) -> str | None:
    others = [device for device in facts.torch_devices if device != "cpu"]
    return f"ops on {', '.join(others)} run natively, as without this library" if others else None


def _no_jax_cpu(facts: Facts) -> str | None:
    wanted = facts.environment.get("JAX_PLATFORMS", "")
    return f"JAX_PLATFORMS={wanted} leaves out cpu" if wanted and "cpu" not in wanted.lower().split(",") else None


_FALSE = ("0", "false", "no", "off")
CHECKS: tuple[Check, ...] = (
    Check("package-missing", "error", _missing, "install the package again with its dependencies"),
    Check("something-fails", "error", _failed, "put the message above into a bug report, with this whole text"),
    Check("bad-option", "error", lambda facts: facts.options or None, "correct the variable, or unset it"),
    Check("torch-too-old", "error", _old_torch, "install torch 2.11 or newer"),
    Check(
        "newer-than-tested",
        "note",
        _untested,
        "nothing to do if your program's report has no failed compilations; what cannot be compiled runs natively",
    ),
    Check("jaxlib-mismatch", "error", _jaxlib_mismatch, "install jax and jaxlib of the same version"),
    Check("fast-math", "error", _fast_math, "take the flag out of XLA_FLAGS; results would leave eager's tolerances"),
    Check("wide-vectors", "error", _wide_vectors, "take the flag out of XLA_FLAGS; results would be wrong"),
    Check(
        "openmp-spins",
        "warning",
        _spinning,
        "start Python with OMP_WAIT_POLICY=PASSIVE or OMP_NUM_THREADS=1; steps may otherwise stall for milliseconds",
    ),
    Check("too-many-threads", "warning", _oversubscribed, "set OMP_NUM_THREADS to the number of usable cores, or less"),
    Check("jax-preallocates", "note", _preallocation, "start Python with XLA_PYTHON_CLIENT_PREALLOCATE=false"),
    Check("gpu-not-fused", "note", _not_fused, "nothing to do: what lies in the host's memory is fused"),
    Check("jax-without-cpu", "warning", _no_jax_cpu, "add cpu to JAX_PLATFORMS: tensors on the CPU are fused there"),
    Check("jax-no-jit", "warning", _set("JAX_DISABLE_JIT", *_FALSE), "unset it: JAX would not compile"),
    Check(
        "jax-debug-nans",
        "warning",
        _set("JAX_DEBUG_NANS", *_FALSE),
        "unset it and use mode debug with the option check_nan, which names the op and your line",
    ),
    Check(
        "jax-matmul-precision",
        "warning",
        _set("JAX_DEFAULT_MATMUL_PRECISION", "default"),
        "unset it and use torch.set_float32_matmul_precision, which is obeyed",
    ),
    Check("jax-x64", "note", _x64, "nothing to do: dtypes are exact with and without it"),
    Check(
        "cache-unwritable",
        "warning",
        lambda facts: facts.cache_problem or None,
        "name a folder that is yours alone in FUSED_EAGER_CACHE_DIR (a shared one in FUSED_EAGER_CACHE), or make it "
        "writable; until then every process compiles everything anew",
    ),
    Check(
        "cache-without-keys",
        "warning",
        lambda facts: None if facts.cache_keys else "FUSED_EAGER_CACHE names shared stores, and there are no keys",
        "set FUSED_EAGER_CACHE_KEYS, or FUSED_EAGER_CACHE_UNSIGNED=1 if you trust whoever can write there",
    ),
    Check(
        "no-follower",
        "note",
        lambda facts: facts.follower_obstacle
        and f"ops that come again are followed in Python: {facts.follower_obstacle}",
        "install a C++ compiler and Python's headers (on Debian: g++ python3-dev); it is used by itself then",
    ),
    Check(
        "not-cpython",
        "error",
        lambda facts: None if facts.implementation == "CPython" else f"Python is {facts.implementation}",
        "use CPython",
    ),
    Check(
        "no-gil",
        "warning",
        lambda facts: None if facts.gil else "this Python runs without its global lock",
        "start it with PYTHON_GIL=1; nothing here is tested without the lock",
    ),
)


def _needed(facts: Facts, needs: Sequence[str]) -> Iterator[Finding]:
    """What stands in the way of features that are needed."""
    for feature in FEATURES:
        if feature.name in needs and (why := facts.features.get(feature.name, "")):
            yield Finding("feature-missing", "error", f"{feature.name} ({feature.about}): {why}", feature.cure)


def findings(facts: Facts, needs: Sequence[str] = ()) -> tuple[Finding, ...]:
    """What `CHECKS` says of `facts`, and which features that are needed cannot work; worst first."""
    found = [Finding(row.code, row.severity, text, row.cure) for row in CHECKS if (text := row.holds(facts))]
    found += _needed(facts, needs)
    return tuple(sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity)))


def _status(feature: Feature, why: str) -> str:
    if not why:
        return f"works: {feature.about}"
    return f"no: {why}" if feature.cure in why else f"no: {why}; {feature.cure}"


def describe(facts: Facts, found: tuple[Finding, ...]) -> str:
    """Facts and findings as text that can go into a bug report."""
    rows = [
        ("python", f"{facts.python} ({facts.implementation}, {facts.system})"),
        *((name, version or "not installed") for name, version in facts.versions.items()),
        ("torch devices", ", ".join(facts.torch_devices) or "none"),
        ("jax devices", ", ".join(facts.jax_devices) or "none"),
        ("jax x64", "on" if facts.jax_x64 else "off"),
        ("cpu", f"{facts.cores} usable cores; {' '.join(facts.cpu_features) or 'features unknown'}"),
        ("torch cpu kernels", facts.torch_cpu or "unknown"),
        ("torch threads", f"{facts.torch_threads} ({'OpenMP' if facts.torch_openmp else 'no OpenMP'})"),
        ("storage trap", facts.failures.get("storage trap", "works")),
        ("fusing", facts.failures.get("fusing", "works")),
        ("compiled follower", facts.follower or "unknown"),
        ("cache", ", ".join(facts.cache) or "unknown"),
        *facts.environment.items(),
        *((f"feature {f.name}", _status(f, facts.features[f.name])) for f in FEATURES if f.name in facts.features),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows] + [""]
    for finding in found:
        lines += [f"{finding.severity}: {finding.text} [{finding.code}]", f"    {finding.cure}"]
    return "\n".join(lines if found else [*lines, "No known problem was found."])


def as_json(facts: Facts, found: tuple[Finding, ...]) -> str:
    """The same as JSON: {"facts": {...}, "findings": [...]}."""
    return json.dumps({"facts": asdict(facts), "findings": [asdict(finding) for finding in found]}, indent=2)


def main(argv: list[str], prog: str) -> int:
    """`doctor`: print facts and findings. Returns 1 if one of them is an error, else 0."""
    parser = argparse.ArgumentParser(prog=prog, description="Say what was found here, in words for a bug report.")
    parser.add_argument("--json", action="store_true", help='print JSON: {"facts": {...}, "findings": [...]}')
    parser.add_argument(
        "--need",
        action="append",
        default=[],
        choices=[feature.name for feature in FEATURES],
        help="a feature without which this machine is of no use: an error if it cannot work; may be repeated",
    )
    arguments = parser.parse_args(argv)
    facts = gather()
    found = findings(facts, arguments.need)
    if arguments.json:
        print(as_json(facts, found))
    else:
        print(describe(facts, found))
    return 1 if any(finding.severity == "error" for finding in found) else 0

"""The key of an entry made for a target is the one that a host with that device asks for.

The platform is faked at one point: its devices, and the client that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from fused_eager.cache import Entry, Key

from fused_eager.compiling import caching, canonical, compile, cross, executable, surroundings
from fused_eager.compiling.key import Computation
from fused_eager.config import resolve
from fused_eager.devices.accelerator import Accelerator
from fused_eager.targets import device as target_device
from fused_eager.targets.device import TargetDevice
from fused_eager.targets.target import Target
from tests.streams import events, recorded

VERSION = "PJRT C API\nTFRT TPU v5 lite\nBuilt on Jun 17 2026"


class Device(SimpleNamespace):
    """One of its devices."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Client:
    """A platform's client: a compile-only one and a running one are asked for the same."""

    def __init__(self, shape: tuple[int, int], version: str = VERSION, platform: str = "tpu"):
        self.platform_version = version
        self.deserialized: list[bytes] = []
        self._devices = [
            Device(
                client=self, platform=platform, device_kind="TPU v5 lite", coords=[x, y, 0], core_on_chip=0, id=number
            )
            for number, (y, x) in enumerate((y, x) for y in range(shape[1]) for x in range(shape[0]))
        ]

    def devices(self) -> list[Any]:
        return self._devices

    def deserialize_executable(self, code: bytes, executable_devices: Any, **options: Any) -> Any:
        self.deserialized.append(code)
        return SimpleNamespace(execute_sharded=None)


def add() -> Any:
    return torch.ones(3, 4) * torch.ones(4) + 1.5


@pytest.fixture(autouse=True)
def targets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Topologies are made by the fake client."""
    made = {"v5e:2x2": Client((2, 2)), "v5e:4x4": Client((4, 4))}
    monkeypatch.setattr(target_device, "devices", lambda target: made[str(target)].devices())
    surroundings._of_process.cache_clear()
    yield
    surroundings._of_process.cache_clear()


def runtime(client: Client, index: int = 0) -> Accelerator:
    return Accelerator("tpu", index, client.devices()[index])


def keeper(folder: Path, **options: Any) -> caching.Keeper:
    return caching.Keeper(resolve({"cache": "", "cache_dir": str(folder), **options}))


def test_it_is_the_key_of_a_running_device_whatever_its_number(tmp_path: Path) -> None:
    kept, region = keeper(tmp_path), recorded(add)
    key = kept.key(region, True, TargetDevice(Target.parse("v5e:2x2")))
    for index in range(4):
        assert kept.key(region, True, runtime(Client((2, 2)), index)) == key
    assert key.parts["backend"]["device"] == "TPU v5 lite" and key.parts["memory"] == "device"


def _environment(name: str, value: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda m: m.setenv(name, value)


OF_THE_HOST: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "its processor": lambda m: m.setattr(
        surroundings, "cpu", lambda: {"architecture": "arm", "model": "another", "features": ["sve"]}
    ),
    "its cores": lambda m: m.setattr(surroundings, "usable_cores", lambda: 97),
    "XLA's threads": _environment("NPROC", "7"),
    "what JAX adds to libtpu's flags": _environment(
        "LIBTPU_INIT_ARGS", " --xla_tpu_use_enhanced_launch_barrier=true"
    ),
}


@pytest.mark.parametrize("what", OF_THE_HOST)
def test_what_the_two_hosts_may_differ_in_is_not_in_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Key(surroundings.parts(True, "", TargetDevice(Target.parse("v5e:2x2")))).digest
    OF_THE_HOST[what](monkeypatch)
    surroundings._of_process.cache_clear()
    assert Key(surroundings.parts(True, "", runtime(Client((2, 2))))).digest == before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jax_pjrt_client_create_options", f"ml_framework_name:JAX;ml_framework_version:{jax.__version__}"),
        ("jax_num_cpu_devices", 4),
        ("jax_cpu_collectives_implementation", "mpi"),
    ],
)
def test_nor_is_what_jax_sets_for_itself(option: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = runtime(Client((2, 2)))
    before, real = surroundings.parts(True, "", device), jax.config
    others = {name: getattr(real, name, None) for name in surroundings._JAX_OPTIONS}
    monkeypatch.setattr(surroundings.jax, "config", SimpleNamespace(**{**others, option: value}))
    assert surroundings.parts(True, "", device) == before
    assert surroundings.parts(True, "")["numerics"][option] == value  # the processor's code may depend on it


OF_THE_DEVICE: dict[str, Client] = {
    "the version of its runtime": Client((2, 2), version="PJRT C API\nTFRT TPU v5 lite\nBuilt on Jun 18 2026"),
    "its topology": Client((4, 4)),
}


@pytest.mark.parametrize("what", OF_THE_DEVICE)
def test_what_the_code_depends_on_is_in_it(what: str) -> None:
    here = Key(surroundings.parts(True, "", TargetDevice(Target.parse("v5e:2x2")))).digest
    assert Key(surroundings.parts(True, "", runtime(OF_THE_DEVICE[what]))).digest != here


def test_flags_of_libtpu_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = runtime(Client((2, 2)))
    before = Key(surroundings.parts(True, "", device)).digest
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1024")
    surroundings._of_process.cache_clear()
    assert Key(surroundings.parts(True, "", device)).digest != before


def test_a_simulated_device_still_names_the_processor_that_simulates_it() -> None:
    simulated = Accelerator("tpu", 0, jax.devices("cpu")[0])
    assert {"cpu", "threads"} <= surroundings.parts(True, "", simulated).keys()


def test_an_entry_is_loaded_on_a_host_with_another_processor_and_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, target = recorded(add), TargetDevice(Target.parse("v5e:2x2"))
    writer = keeper(tmp_path)
    key = writer.key(region, True, target)
    made = executable.Executable(cross._nowhere, (), 1.0, region.name)
    writer.cache.publish(key, executable.to_blobs(executable.Portable(b"code", ()), made), metadata={"seconds": 1.0})
    entry = writer.cache.peek(key)
    assert isinstance(entry, Entry) and entry.manifest.origin.cpu_features == ()
    assert entry.manifest.origin.device_kind == "TPU v5 lite"

    # The host with the device.
    OF_THE_HOST["its processor"](monkeypatch)
    surroundings._of_process.cache_clear()
    client = Client((2, 2))
    device = runtime(client, 3)
    monkeypatch.setattr(executable, "assigned", lambda on: on.id)
    monkeypatch.setattr(executable.xla_client._xla, "DeviceList", lambda devices: devices)
    monkeypatch.setattr(executable, "direct", lambda *a: "the call")
    monkeypatch.setattr(compile, "build", _never)
    reader = keeper(tmp_path)
    with events("cache-load", "cache-unloadable", "cache-refused") as seen:
        found = compile.load_or_compile(region, compile.Settings(keeper=reader, device=device))
    assert [e.kind for e in seen] == ["cache-load"] and client.deserialized == [b"code"]
    assert found.call == "the call" and found.key == key.digest


def _never(*args: Any) -> Any:
    raise AssertionError("compiled")


def test_an_entry_for_the_processor_is_still_refused_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, region = keeper(tmp_path), recorded(add)
    key = kept.key(region, True)
    kept.cache.publish(key, {"about": b"{}"})
    assert isinstance(kept.cache.peek(key), Entry)
    other = surroundings.Origin("other", "cpu", ("avx1024",))
    monkeypatch.setattr(surroundings, "origin", lambda: other)
    assert kept.cache.peek(key).reason == "foreign-machine"


def test_a_region_survives_being_written_down(tmp_path: Path) -> None:
    region: Computation = recorded(add)
    again = canonical.to_computation(canonical.to_parts(region))
    target = TargetDevice(Target.parse("v5e:2x2"))
    assert keeper(tmp_path).key(again, True, target) == keeper(tmp_path).key(region, True, target)

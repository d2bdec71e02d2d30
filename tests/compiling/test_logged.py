"""A region in an event log becomes the one that a target's own host asks for; what cannot is said, not guessed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
import torch
from fused_eager.cache import Key

from fused_eager.compiling import canonical, surroundings
from fused_eager.compiling.key_text import packed, unpacked
from fused_eager.compiling.logged import for_target
from fused_eager.devices.accelerator import Accelerator
from fused_eager.devices.device import Device
from fused_eager.devices.host.device import HOST
from fused_eager.quiet import default_dtype
from fused_eager.targets.device import TargetDevice
from fused_eager.targets.target import Target
from tests.streams import recorded

SIMULATED = Accelerator("tpu", 0, jax.devices("cpu")[0])


class Here(TargetDevice):
    """A target whose devices are the CPU's: no compiler is needed to make keys for it."""

    @property
    def xla(self) -> Any:
        return jax.devices("cpu")[0]


TARGET = Here(Target.parse("v5e:1"))


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def key_of(device: Device, salt: str = "") -> Key:
    region = recorded(lambda: torch.ones(3, 4) @ torch.ones(4, 5) + 1.5)
    return Key({"region": canonical.to_parts(region), **surroundings.parts(True, salt, device)})


def row(key: Key, **changed: Any) -> dict[str, Any]:
    return {"region": "2 ops from x.py:3", "key": key.digest, "parts": packed(key), **changed}


def test_a_key_is_one_line_of_text() -> None:
    key = key_of(SIMULATED)
    assert unpacked(packed(key)) == key and "\n" not in packed(key)


@pytest.mark.parametrize("text", ["", "no base64!", "AAAA", packed(Key({"region": 1}))[:-8]])
def test_what_is_damaged_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the parts of its key cannot be read"):
        unpacked(text)


def test_it_is_keyed_for_the_target_under_the_settings_of_that_run_and_this_salt() -> None:
    torch.set_float32_matmul_precision("medium")
    with default_dtype(torch.float64):
        theirs, wanted = key_of(SIMULATED, "theirs"), key_of(TARGET, "ours")
    torch.set_float32_matmul_precision("highest")
    (met,), of_the_host = for_target([row(theirs), row(theirs)], TARGET, "ours")
    assert met.key == wanted and met.name == "2 ops from x.py:3" and not met.why and of_the_host == 0
    assert [op.name for op in met.ops][-2:] == ["aten.mm.default", "aten.add.Tensor"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_log_of_the_target_itself_gives_its_own_keys() -> None:
    key = key_of(TARGET)
    assert for_target([row(key)], TARGET, "")[0][0].key == key


def test_regions_of_cpu_tensors_are_left_out() -> None:
    assert for_target([row(key_of(HOST))], TARGET, "") == ([], 1)


def test_another_setting_of_jax_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(SIMULATED)
    numerics = {**key.parts["numerics"], "jax_default_matmul_precision": "bfloat16"}
    (met,), _ = for_target([row(Key({**key.parts, "numerics": numerics}))], TARGET, "")
    assert met.key is None and "jax_default_matmul_precision bfloat16 and not None" in met.why


@pytest.mark.parametrize("changed", [{"parts": "AAAA"}, {"parts": packed(Key({"memory": "device"}))}])
def test_a_line_that_is_none_is_a_region_without_a_key(changed: dict[str, Any]) -> None:
    (met,), _ = for_target([row(key_of(SIMULATED), **changed)], TARGET, "")
    assert met.key is None and met.why

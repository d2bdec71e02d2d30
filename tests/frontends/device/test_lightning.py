"""Lightning's registries are filled when it is imported. What stands in for them has their names and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# As much of either half as is asked: registries, the classes to derive from, and a precision.
STAND_IN = {
    "__init__.py": "",
    "strategies.py": """
from .accelerators import Registry
STRATEGY_REGISTRY = StrategyRegistry = Registry()
class Base:
    _accelerator = _precision = None
    @property
    def accelerator(self): return self._accelerator
    @accelerator.setter
    def accelerator(self, value): self._accelerator = value
    @property
    def NAMED(self): return self._precision
    @NAMED.setter
    def NAMED(self, value): self._precision = value
class SingleDeviceStrategy(Base):
    def __init__(self, device): self._root_device = device
class DDPStrategy(Base): pass
""",
    "accelerators.py": """
class Registry(dict):
    def register(self, name, cls, description, **options): self[name] = (cls, options)
ACCELERATOR_REGISTRY = AcceleratorRegistry = Registry()
class Accelerator: pass
""",
    "plugins/__init__.py": "",
    "plugins/precision.py": """
class MixedPrecision:
    def __init__(self, precision, device): self.precision, self.device = precision, device
""",
}
PROGRAM = """
import sys, torch
early = "early" in sys.argv
if early: import pytorch_lightning.strategies, lightning_fabric.strategies
import fused_eager.tpu
import pytorch_lightning.strategies, lightning_fabric.strategies
for package, precision in ("pytorch_lightning", "precision_plugin"), ("lightning_fabric", "precision"):
    theirs, accelerators = sys.modules[package + ".strategies"], sys.modules[package + ".accelerators"]
    mixed = __import__(package + ".plugins.precision", fromlist=["MixedPrecision"]).MixedPrecision
    accelerator = accelerators.AcceleratorRegistry["fused_eager"][0]
    kind, options = theirs.StrategyRegistry["fused_eager"]
    strategy = kind(**options)
    assert strategy._root_device == torch.device("tpu:0") and strategy.parallel_devices == []
    strategy.accelerator = object()  # what Lightning has found by itself
    assert isinstance(strategy.accelerator, accelerator)
    setattr(strategy, precision, mixed("bf16-mixed", "cuda"))
    assert vars(getattr(strategy, precision)) == {"precision": "bf16-mixed", "device": "tpu"}
    strategy.parallel_devices = accelerator.get_parallel_devices(accelerator.parse_devices("1,"))
    assert strategy._root_device == torch.device("tpu:1")
    assert accelerator.get_parallel_devices(3) == [torch.device("tpu", i) for i in (0, 1, 0)]
    assert accelerator.parse_devices(-1) == 2 and accelerator.parse_devices("2") == 2
    assert theirs.StrategyRegistry["fused_eager_ddp"][1] == {"process_group_backend": "fused_eager"}
    try:
        accelerator().setup_device(torch.device("cpu"))
    except ValueError as error:
        assert "strategy='fused_eager'" in str(error)
    else:
        raise AssertionError("trains on the CPU")
print("registered")
"""


def test_the_registries_are_filled_whichever_is_imported_first(tmp_path: Path) -> None:
    for package, precision in (("pytorch_lightning", "precision_plugin"), ("lightning_fabric", "precision")):
        for name, text in STAND_IN.items():
            file = tmp_path / package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("NAMED", precision))
    variables = {**os.environ, "FUSED_EAGER_DEVICES": "2", "PYTHONPATH": str(tmp_path)}
    for order in ("early", "late"):
        command = [sys.executable, "-c", PROGRAM, order]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert done.stdout == "registered\n", done.stderr

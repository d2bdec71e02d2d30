"""What every test stands on: the same options, threads and checks on every machine."""

from __future__ import annotations

import os

# The developer's own settings must not decide what is tested. Before anything reads them.
for name in [name for name in os.environ if name.startswith("FUSED_EAGER_")]:
    del os.environ[name]
os.environ["FUSED_EAGER_VALIDATE"] = "1"
# Two spinning thread pools on two cores stall each other for milliseconds at a time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

torch.set_num_threads(1)

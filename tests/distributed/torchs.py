"""PyTorch's own tests of process groups, as they are installed with it, on two ranks that are forked.

`python -m tests.distributed.torchs '{"mode": "strict"}' [TEST...]` runs each within a context with these options, or
with `null` plain, and prints what came of them as JSON: "" for what has passed, else what was wrong. What is skipped is
left out; most of that wants an accelerator of its own. This process has imported torch and JAX and not the library,
which leaves everything to torch in what is forked from a process that has it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from typing import Any

os.environ.update(BACKEND="gloo", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", TEMP_DIR=tempfile.mkdtemp(prefix="torchs-"))

import jax  # noqa: F401  (imported once for all ranks)
import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

OPTIONS: dict[str, Any] = {}
IS_PLAIN = [True]


class OnForkedRanks(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, name: str, pipe: Any) -> None:
        """In a rank."""
        if IS_PLAIN[0]:
            super().run_test(name, pipe)
            return
        from fused_eager import fused_eager

        with fused_eager(**OPTIONS):
            super().run_test(name, pipe)


class Told(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def _tell(self, test: Any, text: str) -> None:
        self.found[test._testMethodName] = text
        said = text.strip().splitlines()[-1] if text else "passed"
        print(f"{test._testMethodName}: {said}", file=sys.stderr, flush=True)

    def addSuccess(self, test: Any) -> None:
        self._tell(test, "")

    def addFailure(self, test: Any, err: Any) -> None:
        self._tell(test, self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure


def main() -> None:
    options = json.loads(sys.argv[1])
    IS_PLAIN[0] = options is None
    OPTIONS.update(options or {})
    torch.set_num_threads(1)
    names = sys.argv[2:] or unittest.TestLoader().getTestCaseNames(OnForkedRanks)
    told = Told()
    unittest.TestSuite(OnForkedRanks(name) for name in names).run(told)
    print(json.dumps(told.found), flush=True)


if __name__ == "__main__":
    main()

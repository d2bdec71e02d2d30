"""torch's own op corpus, `OP_DB`, without what it does for torch's own test classes alone."""

from __future__ import annotations

from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db as OP_DB
from torch.testing._internal.opinfo import core

# To tell which test a sample belongs to, each iteration over samples formats the whole stack, a tenth of a second, and
# finds none where no `unittest.TestCase` is at work.
for module in (common_utils, core):
    module.extract_test_fn = lambda: None

__all__ = ["OP_DB"]

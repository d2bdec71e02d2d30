"""Special functions in the form that a TPU's compiler takes in seconds: the same values, fewer powers of doubles."""

from __future__ import annotations

import jax
import numpy as np
import torch
from fused_eager.fusion_rules.lower_special import zeta
from fused_eager.fusion_rules.platforms import lowering_for

S = np.array([2.0, 3.0, 2.5, 7.0, 3.0, 0.5, 1.0, 2.5, 2.0, np.nan, 4.0, 1.0, np.inf, 3e38])
Q = np.array([-1000.5, -77.25, -50.5, -33.1, 0.7, 2.0, 2.0, -3.5, -1e300, 1.0, 1e9, -88.8, -88.8, -88.8])


def test_zeta_has_the_same_values_with_one_power_of_doubles() -> None:
    with jax.enable_x64(True):
        asked = jax.jit(zeta).trace(S, Q)
        everywhere = jax.jit(zeta)(S, Q)
        with lowering_for("tpu"):
            brief = jax.jit(lambda x, q: zeta(x, q)).trace(S, Q)
            there = jax.jit(lambda x, q: zeta(x, q))(S, Q)
        assert str(brief.jaxpr).count(" pow ") == 1 and str(asked.jaxpr).count(" pow ") == 4
        np.testing.assert_array_equal(there, everywhere)
    wanted = torch.special.zeta(torch.tensor(S[4:8]), torch.tensor(Q[4:8]))
    np.testing.assert_allclose(there[4:8], wanted, rtol=1e-9)

"""What a collective takes by a link's two numbers."""

from __future__ import annotations

import pytest

from fused_eager.targets.links import LINKS, Link, LinkError

LINK = Link("test", 1.0, 10.0, "made up")  # a second for a message, and 10 bytes in another


@pytest.mark.parametrize(
    ("op", "nbytes", "ranks", "seconds"),
    [
        ("allreduce_", 80, 4, 6 + 12),  # 2 x 3 messages of a quarter each
        ("allreduce_coalesced_", 80, 4, 6 + 12),
        ("_allgather_base_", 100, 4, 3 + 6),  # 80 and this rank's 20: three quarters of 80 come from others
        ("allgather_into_tensor_coalesced_", 100, 4, 3 + 6),
        ("_reduce_scatter_base_", 100, 4, 3 + 6),
        ("alltoall_base_", 80, 4, 3 + 3),
        ("broadcast_", 20, 8, 3 + 2),
        ("reduce_", 20, 8, 3 + 2),
        ("send", 20, 8, 1 + 2),
        ("barrier", 0, 8, 6 + 2.4),
        ("allreduce_", 80, 1, 0),
    ],
)
def test_what_a_collective_takes(op: str, nbytes: int, ranks: int, seconds: float) -> None:
    assert LINK.seconds(op, nbytes, ranks) == pytest.approx(seconds)


def test_a_link_by_its_name_and_by_its_numbers() -> None:
    assert Link.parse("dcn") is LINKS["dcn"]
    given = Link.parse("10,12.5")
    assert (given.alpha, given.bandwidth) == (pytest.approx(1e-5), 12.5e9)
    for wrong in ("ethernet", "10", "10,0", "-1,5", "1,2,3", "nan,1"):
        with pytest.raises(LinkError, match="no link"):
            Link.parse(wrong)

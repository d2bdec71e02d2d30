"""The connection to the job's store is told from others that are opened at the same time."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from fused_eager.ranks import sockets
from fused_eager.ranks.channel import Channel, StoreGone

STORES: dict[str, Callable[[Path], Any]] = {
    "file": lambda folder: distributed.FileStore(str(folder / "store"), 1),
    "tcp": lambda folder: distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
}


@pytest.mark.parametrize("kind", STORES)
def test_sockets_of_others_are_none_of_the_stores(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo opens some while a group is made, and the process that compiles is talked to through one."""
    others: list[socket.socket] = []
    open_now = sockets.open_now

    def opening() -> sockets.Sockets:
        found = open_now()
        if not others:
            others.extend((*socket.socketpair(), socket.create_server(("127.0.0.1", 0))))
        return found

    monkeypatch.setattr(sockets, "open_now", opening)
    store = STORES[kind](tmp_path)  # which serves as long as it lives
    channel = Channel(store, 5.0)
    for each in others:
        each.close()
    assert others
    channel.put("name", "text")
    assert channel.get("name") == "text"


def test_the_stores_own_is_found_and_its_end_noticed() -> None:
    store = STORES["tcp"](Path())
    channel = Channel(store, 5.0)
    channel.put("name", "text")
    assert sockets.cut_to(channel.port) >= 1
    with pytest.raises(StoreGone):
        channel.put("name", "other")

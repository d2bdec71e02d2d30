"""Programs as people write them compute on both doors what they compute in plain PyTorch."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from .__main__ import shard, write
from .running import FOLDER, Run, differences, missing, run
from .table import BOTH, CLIENTS, DOORS, Client, Door

# The others, and the other ways to run these, are for `make test-clients`.
SHORT = {("VAE", "context"), ("VAE", "tpu")}


def _case(client: Client, door: Door) -> Any:
    marks = () if (client.name, door.name) in SHORT else (pytest.mark.slow,)
    return pytest.param(client, door, id=f"{client.name}-{door.name}", marks=marks)


@cache
def plain(client: Client) -> Run:
    return run(client, None, Path(mkdtemp(prefix="fused-eager-clients-")))


def check(client: Client, door: Door, folder: Path) -> None:
    if missing(client):
        pytest.skip(missing(client))
    expected = plain(client)
    assert expected.status == 0, expected.said[-3000:]
    found = run(client, door, folder)
    assert found.status == 0 and found.results is not None, found.said[-3000:]
    assert differences(expected.results, found.results, client.tolerance, client.skipped) == []
    assert "os.fork()" not in found.said


@pytest.mark.parametrize(("client", "door"), [_case(c, d) for c in CLIENTS for d in BOTH])
def test_a_client_computes_what_it_does_in_plain_pytorch(client: Client, door: Door, tmp_path: Path) -> None:
    check(client, door, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["VAE", "REINFORCE", "graph attention", "DQN", "k-means"])
@pytest.mark.parametrize("door", [d for d in DOORS if d not in BOTH], ids=lambda door: door.name)
def test_a_client_computes_it_in_every_mode_and_again_with_the_cache_full(
    name: str, door: Door, tmp_path: Path
) -> None:
    client = next(c for c in CLIENTS if c.name == name)
    check(client, door, tmp_path)
    check(client, door, tmp_path)


@pytest.mark.parametrize("file", sorted((FOLDER / "examples").glob("*.py")), ids=lambda file: file.name)
def test_the_programs_know_nothing_of_the_library(file: Path) -> None:
    assert re.findall(r"fused.?eager|jax|xla", file.read_text(), re.IGNORECASE) == []
    assert any(c.command[0] == file.name for c in CLIENTS), "no client runs it"


def test_differences_are_found() -> None:
    a: Any = {"losses": [1.0, 2.0], "model": {"w": torch.ones(3)}, "words": [1, 2]}
    assert differences(a, a, 1e-3) == []
    b: Any = {"losses": [1.0, 2.1], "model": {"w": torch.tensor([1.0, 1.0, 1.5])}, "words": [1, 3]}
    assert [d.partition(":")[0] for d in differences(a, b, 1e-3)] == ["/losses[1]", "/model/w", "/words[1]"]
    assert differences(a, b, 1e-3, ("model", "words")) == ["/losses[1]: 2.1, not 2.0"]
    nothing = {"w": torch.tensor([1.0, math.nan]), "f": math.nan}
    assert not differences(nothing, {"w": torch.tensor([1.0, math.nan]), "f": math.nan}, 1e-3)
    assert len(differences(nothing, {"w": torch.tensor([math.nan, 1.0]), "f": 1.0}, 1e-3)) == 2
    assert differences(a, {**a, "model": {"w": torch.ones(4)}}, 1e-3) and differences(a, {"losses": []}, 1e-3)


def test_the_page_keeps_the_rows_of_clients_that_were_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write(page, {"VAE": ["| VAE | 1 | context | equal | 1.0 |  |"], "DQN": ["| DQN | 1 | tpu | fails | 1.0 |  |"]})
    write(page, {"DQN": ["| DQN | 2 | tpu | equal | 1.0 |  |"]})
    found = [line for line in page.read_text().splitlines() if line.startswith(("| VAE", "| DQN"))]
    assert found == ["| VAE | 1 | context | equal | 1.0 |  |", "| DQN | 2 | tpu | equal | 1.0 |  |"]


def test_shards_have_each_client_once() -> None:
    found = [c.name for k in range(1, 6) for c in CLIENTS[shard(f"{k}/5")]]
    assert sorted(found) == sorted(c.name for c in CLIENTS)
    for wrong in ("0/4", "5/4", "2", "a/b"):
        with pytest.raises(ValueError):
            shard(wrong)


def test_a_client_that_does_not_end_is_a_row_and_not_an_error(tmp_path: Path) -> None:
    found = run(next(c for c in CLIENTS if c.name == "VAE"), None, tmp_path, timeout=0.2)
    assert (found.status, found.results) == (124, None)
    assert found.said.splitlines()[-1] == "not done after 0 s"

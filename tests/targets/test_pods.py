"""A step on all chips of a mesh: what is divided among them, and what XLA's partitioner adds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fused_eager.cache import Key

from fused_eager.commands import pods
from fused_eager.commands.pods import Row, as_text
from fused_eager.compiling.met import Met
from fused_eager.compiling.pods import Collective, by_kind, collectives
from fused_eager.targets import topology
from fused_eager.targets.links import Link
from fused_eager.targets.mesh import Mesh
from fused_eager.targets.target import Target, TargetError

PROGRAM = """
import torch
torch.set_default_device("tpu")
m = torch.nn.Linear(128, 256)
o = torch.optim.SGD(m.parameters(), lr=0.1)
x = torch.ones(512, 128)
for _ in range(4):
    o.zero_grad()
    loss = m(x).square().mean()
    loss.backward()
    o.step()
    loss.item()
"""


def test_each_axis_divides_the_first_dimension_of_its_size() -> None:
    mesh = Mesh.parse("data=64, model=16", "512=data,1024=model,2048=model")
    assert mesh.chips == 1024 and str(mesh) == "data=64,model=16"
    assert mesh.divided((512, 7)) == ("data", None) and mesh.divided((7,)) == (None,)
    assert mesh.divided((1024, 2048)) == ("model", None) and mesh.divided((2048, 512)) == ("model", "data")
    assert [str(some) for some in mesh.smaller()] == [f"data={n},model=16" for n in (1, 4, 16, 64)]
    assert [some.chips for some in Mesh.parse("data=6", "12=data").smaller()] == [1, 6]


@pytest.mark.parametrize(
    ("axes", "split", "why"),
    [
        ("data", "512=data", "write axes with their sizes"),
        ("data=4", "data=512", "write axes with their sizes"),
        ("data=4", "512=model", "no axis 'model', only data"),
        ("data=4", "6=data", "6 cannot be divided among 4 chips"),
        ("data=0", "6=data", "a chip or more"),
        ("data=2,data=2", "6=data", "a name of its own"),
        ("data=2", "{6*rows}=data", "no axis 'rows', only data"),
    ],
)
def test_what_is_no_mesh_is_refused(axes: str, split: str, why: str) -> None:
    with pytest.raises(TargetError, match=why):
        Mesh.parse(axes, split)


def test_sizes_may_grow_with_an_axis() -> None:
    text = "{128*data}=data,1024=model"
    mesh = Mesh.parse("data=64,model=16", text)
    assert mesh.split == ((8192, "data"), (1024, "model"))
    assert [Mesh.parse(str(some), text).split[0][0] for some in mesh.smaller()] == [128, 512, 2048, 8192]
    assert mesh.grown("--batch={2*data} {x} {3*model}") == "--batch=128 {x} 48"


def test_a_program_that_grows_is_run_for_each_number_of_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def meet(given: argparse.Namespace, mode: str) -> tuple[list[Met], dict[str, int]]:
        ran.append(given.arguments)
        return [Met(Key({"region": 1}), "a region", runs=Counter({2: 1}))], {"steps": 3}

    monkeypatch.setattr(pods, "meet", meet)
    monkeypatch.setattr(pods, "row", lambda found, target, mesh, link, jobs: Row(mesh, 1e-3, 0.0, 0, [], 1, {}))
    link, v5e = Link("ici-v5e", 1e-6, 90e9, "public figures"), Target.parse("v5e:4x4")
    given = argparse.Namespace(split="{8*data}=data", arguments=["--batch", "{8*data}"], jobs=1)
    made = list(pods.rows(given, v5e, Mesh.parse("data=16", given.split), link))
    assert [row.mesh.chips for row in made] == [1, 4, 16]
    assert [theirs[1] for theirs in ran] == ["8", "32", "128"]
    text = as_text(v5e, made, link, grows=True)
    assert "weak scaling" in text and text.count("100%") == 3
    ran.clear()
    same = argparse.Namespace(split="64=data", arguments=["--batch", "64"], jobs=1)
    made = list(pods.rows(same, v5e, Mesh.parse("data=4", same.split), link))
    assert len(ran) == 1 and len(made) == 2


def test_collectives_as_xla_writes_them() -> None:
    text = """
  %a = f32[512,256]{1,0:T(8,128)} all-reduce(%b), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %c = (f32[8]{0}, bf16[4,4]{1,0}) all-reduce(%d, %e), replica_groups=[2,8]<=[16], to_apply=%add
  %f = (f32[8]{0}, f32[32]{0}) all-gather-start(%g), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}
  %h = f32[8]{0} all-gather-done(%f)
  %i = bf16[16]{0:S(1)} reduce-scatter(%j), replica_groups={{0,1}}, dimensions={0}
  %k = f32[8]{0} collective-permute(%l), source_target_pairs={{0,1}}
  %m = f32[8]{0} fusion(%all-reduce.5), kind=kLoop
"""
    found = collectives(text)
    assert found == [
        Collective("all-reduce", 4 * 512 * 256, 4),
        Collective("all-reduce", 64, 8),
        Collective("all-gather", 128, 4),
        Collective("reduce-scatter", 64, 2),
        Collective("collective-permute", 32, 2),
    ]
    assert by_kind(found)["all-reduce"] == (2, 4 * 512 * 256 + 64)


def test_what_collectives_take_follows_the_ring() -> None:
    link = Link("some", 1.0, 100.0, "given")
    assert Collective("all-reduce", 400, 4).seconds(link) == pytest.approx(6 + 6)
    assert Collective("all-gather", 400, 4).seconds(link) == pytest.approx(3 + 3)
    assert Collective("reduce-scatter", 400, 4).seconds(link) == pytest.approx(3 + 3)
    assert Collective("all-to-all", 400, 4).seconds(link) == pytest.approx(3 + 3)
    assert Collective("collective-permute", 400, 2).seconds(link) == pytest.approx(1 + 4)


def test_the_table_tells_what_was_left_out() -> None:
    mesh = Mesh.parse("data=4", "512=data")
    rows = [
        Row(next(mesh.smaller()), 4e-3, 0.0, 1 << 30, [], 1, {}),
        Row(mesh, 1e-3, 1e-3, 1 << 29, [Collective("all-reduce", 1 << 20, 4)], 1, {"5 ops": "XLA: no"}),
    ]
    text = as_text(Target.parse("v5e:2x2"), rows, Link("ici-v5e", 1e-6, 90e9, "public figures"))
    assert "50%  1 all-reduce 1 MB" in text and "left out: 5 ops: XLA: no" in text and "strong scaling" in text


@pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
def test_a_step_is_compiled_for_ever_more_chips(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "fused_eager", "forecast", "--target", "v5e:2x2", "--mesh", "data=4"]
    command += ["--split", "512=data", "--valueless", "--json", "--jobs", "1", str(tmp_path / "train.py")]
    done = subprocess.run(command, env={**os.environ, "FUSED_EAGER_CACHE": "off"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    one, all_of_them = json.loads(done.stdout)
    assert one["mesh"] == {"data": 1} and all_of_them["mesh"] == {"data": 4} and all_of_them["divided"] == 1
    assert not one["failed"] and one["sending"] == 0 and not all_of_them["failed"]
    # The gradients of weight and bias, and the loss: a sum over all chips each.
    assert all_of_them["collectives"]["all-reduce"][1] >= 4 * (128 * 256 + 256 + 1)
    assert 0 < all_of_them["computing"] < one["computing"] and all_of_them["memory"] < one["memory"]

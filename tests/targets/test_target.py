"""Targets: texts and values, what is missing is said, and nobody who names none pays for them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from fused_eager.targets import topology
from fused_eager.targets.target import CHIPS, Target, TargetError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v5e:2x2", "v5e:2x2"),
        (" V5E:4x4 ", "v5e:4x4"),
        ("v5e:1", "v5e:1x1"),
        ("v5e:8", "v5e:2x4"),
        ("v6e:64", "v6e:8x8"),
        ("v5p:4", "v5p:2x2x1"),
        ("v5p:8x8x16", "v5p:8x8x16"),
        ("v4:32", "v4:2x4x4"),
        ("tpu7x:16", "tpu7x:2x2x4"),
    ],
)
def test_a_text_names_a_target_and_a_target_backoffs_it(text: str, name: str) -> None:
    found = Target.parse(text)
    assert str(found) == name and Target.parse(name) == found and hash(found) == hash(Target.parse(name))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write a chip .v4, .*tpu7x. and its topology, as v5e:2x2"),
        ("v5e", "write a chip .v4, v5e.* and its topology"),
        ("v5:2x2", "no chip 'v5'.*did you mean v5[ep]\\?.*Known: v4"),
        ("v5e:2x2x1", "2 dimensions, as 2x2"),
        ("v5p:2x2", "3 dimensions, as 2x2x1"),
        ("v5e:3x3", "multiple of a host's 2x2"),
        ("v5e:7", "no usual shape"),
        ("v5e:1024", "no usual shape"),
        ("v5e:64x64", "the largest slice of v5e is 16x16"),  # XLA's compiler ends its process
        ("v5p:2x2x32", "the largest slice of v5p is 16x20x28"),
        ("v5e:0x2", "no chips"),
        ("gpu:h100", "'gpu:h100' is no target: .*a machine that has one"),
        ("CUDA", "a machine that has one, with a shared cache"),
        ("cpu:avx2", "for the processor of this host. Run the program once on a host of the other kind"),
    ],
)
def test_what_names_none_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        Target.parse(text)


def test_each_chip_says_what_it_is() -> None:
    assert len({chip.kind for chip in CHIPS.values()}) == len(CHIPS)
    for chip in CHIPS.values():
        assert chip.flops > 1e14 and chip.hbm > 8e9 and chip.bandwidth > 5e11 and len(chip.host) == chip.dimensions


def test_a_missing_compiler_is_told_of_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(topology.NoCompiler, match=r"v5e:4x4 needs .*pip install 'fused-eager\[tpu\]'"):
        topology.devices(Target.parse("v5e:4x4"))


def test_a_program_that_names_no_target_never_looks_for_a_compiler() -> None:
    source = (
        "import sys\n"
        "import fused_eager, torch, jax\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "asked = []\n"
        "from fused_eager.targets import topology\n"
        "topology._devices = topology.obstacle = lambda *a: asked.append(a)\n"
        "fused_eager.register('tpu')\n"
        "print((torch.ones(3, device='tpu') * 2).sum().item(), asked, 'libtpu' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "6.0 [] False", done.stderr

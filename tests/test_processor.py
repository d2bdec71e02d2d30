"""What XLA is told about the processor: wide vectors where they pay, and nothing that it does not know."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from fused_eager.cache import Unencodable

from fused_eager import processor


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    processor._options.cache_clear()
    yield
    processor._options.cache_clear()


def _with(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    monkeypatch.setattr(processor, "cpu", lambda: {"features": list(features)})


def test_wide_vectors_are_asked_for_where_the_clock_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "avx2", "avx512f", "avx512_vbmi2")
    assert processor._options() == {"xla_cpu_prefer_vector_width": 512}


@pytest.mark.parametrize("features", [("avx2", "fma"), ("avx2", "avx512f")], ids=["none", "the first ones"])
def test_not_elsewhere(features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, *features)
    assert processor._options() == {}


def test_the_user_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "avx512_vbmi2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=256")
    assert processor._options() == {}


def test_where_the_system_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Unencodable("cpu", "it is unknown")

    monkeypatch.setattr(processor, "cpu", refuse)
    assert processor._options() == {}


def test_an_option_that_xla_does_not_know_is_left_out_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "avx512_vbmi2")
    monkeypatch.setattr(processor, "_WIDTH", "xla_cpu_of_another_time")
    assert processor._options()
    assert processor.compiled(jax.jit(lambda: 7).lower())() == 7
    assert not processor._options()


def test_other_errors_are_told() -> None:
    class Broken:
        def compile(self, compiler_options: object = None) -> None:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        processor.compiled(Broken())  # type: ignore[arg-type]

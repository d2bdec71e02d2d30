"""An accelerator runs what was recorded for the host, without a tensor on it: the same streams, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from examples import train_gpt
from fused_eager import fused_eager
from fused_eager.devices.accelerator import Accelerator, AcceleratorBuffer
from fused_eager.devices.dlpack import to_tensor
from fused_eager.devices.home import Home
from fused_eager.devices.storage import alias, storage_of
from fused_eager.executing import arguments, load, run
from fused_eager.log.reasons import Reason
from fused_eager.planning.plan import Work
from fused_eager.tracing.stream import DeviceInput, Stream

END = Reason("sync.call")


@dataclass
class Recorded:
    """A stream that the host has run: how it ends, its inputs, and its live values."""

    work: Work
    inputs: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The streams that the host runs from here on."""
    found: list[Recorded] = []
    works: list[Work] = []
    prepare, advance = run._prepare, run.Execution.advance

    def value(item: Any) -> torch.Tensor:
        return (alias(item.storage, item.offset, item.home) if item.array is None else to_tensor(item.array)).clone()

    def prepared(stream: Stream, reason: Reason) -> run.Execution:
        inputs = {item.vid: value(item) for item in stream.inputs}
        made = prepare(stream, reason)
        found.append(Recorded(works[-1], inputs, {}))
        return made

    def advanced(execution: run.Execution) -> None:
        advance(execution)
        for _, vid in execution.assigned:
            found[-1].values[vid] = to_tensor(arguments.as_array(execution.values[vid], execution.device)).clone()

    load.forget()  # so that each stream is planned, and told of
    monkeypatch.setattr(run, "_prepare", prepared)
    monkeypatch.setattr(run.Execution, "advance", advanced)
    monkeypatch.setattr(load, "WATCHERS", [works.append])
    return found


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    device = Accelerator("tpu", 0, jax.devices("cpu")[0])
    yield device
    device.table.clear()


def buffer_of(device: Accelerator, home: Home) -> AcceleratorBuffer:
    """A buffer whose storage is nobody's: where torch does not know the device it makes none."""
    return AcceleratorBuffer(storage_of(torch.empty(0)), device, home)


def values_on(device: Accelerator, of: Recorded) -> dict[int, Any]:
    """The live values of a stream that has been run there, its inputs in arrays."""
    stream = Stream(of.work.config, device)
    stream.nodes = of.work.nodes
    for vid, t in of.inputs.items():
        home = t.dtype, tuple(t.shape)
        buffer = buffer_of(device, home)
        buffer.array = device.put(t)
        stream.inputs.append(DeviceInput(vid, home, buffer, buffer.array, None))
    work = replace(of.work, device=device)
    values = run.run_ahead(stream, load.Kept().fill(work), work.donatable, END)
    return {vid: device.fetch(arguments.as_array(values[vid], device)) for vid in of.values}


def test_the_streams_of_a_training_step_have_the_numbers_of_the_host(
    recorded: list[Recorded], accelerator: Accelerator
) -> None:
    torch.manual_seed(0)
    model = train_gpt.GPT(vocab=11, layers=2, dim=16, seq=8, dropout=0.0)
    optimizer = train_gpt.make_optimizer(model, lr=1e-2)
    ids = torch.randint(11, (3, 8))
    with fused_eager(mode="fused", compile="wait", native="never", cache="off"):
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
    assert sum(len(each.work.nodes) for each in recorded) > 300
    for each in recorded:
        assert each.values
        for vid, found in values_on(accelerator, each).items():
            torch.testing.assert_close(found, each.values[vid], rtol=0, atol=0)


def test_what_nobody_has_written_is_zeros_once_it_is_read(accelerator: Accelerator) -> None:
    buffer = buffer_of(accelerator, (torch.int64, (3,)))
    buffer.lift()
    assert np.asarray(buffer.array).tolist() == [0, 0, 0]
    buffer.release()
    assert buffer.is_at_home


def test_numbers_that_come_again_are_on_the_device_already(accelerator: Accelerator) -> None:
    kept: list[np.ndarray] = []
    first, again = (accelerator.numbers([0.0, 2.5], torch.float64, kept) for _ in range(2))
    assert first is again and np.asarray(first).tolist() == [0.0, 2.5]
    other = accelerator.numbers([-0.0, 2.5], torch.float64, kept)
    assert other is not first and np.signbit(np.asarray(other)[0])

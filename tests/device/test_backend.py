"""`torch.tpu` and `torch.accelerator`: what programs ask a device's module."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from fused_eager.frontends.device.doors import DOORS, set_options
from fused_eager.log.events import LOG

from .compare import TPU


def test_torch_knows_the_accelerator() -> None:
    found = torch.accelerator.current_accelerator()
    assert found is not None and found.type == "tpu" and torch.accelerator.is_available()
    torch.accelerator.synchronize()


def test_devices_are_counted_and_named() -> None:
    assert torch.tpu.is_available() and torch.tpu.device_count() >= 1 and torch.tpu.current_device() == 0
    assert torch.tpu.get_device_properties().platform in ("cpu", "gpu", "tpu") and torch.tpu.get_device_name(0)
    with pytest.raises(RuntimeError, match="there is no device 99"):
        torch.tpu.set_device(99)
    with pytest.raises(ValueError, match="expected a tpu device"):
        torch.tpu.get_device_name("cpu")


def test_memory_is_counted_by_what_lives() -> None:
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    x = torch.ones(1000, device=TPU)
    assert torch.tpu.memory_allocated() - before == 4000
    del x
    assert torch.tpu.memory_allocated() == before
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total


def test_events_and_streams() -> None:
    first, last = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    first.record()
    x = torch.ones(64, 64, device=TPU) @ torch.ones(64, 64, device=TPU)
    last.record()
    last.synchronize()
    assert last.query() and first.elapsed_time(last) > 0 and x.sum().item() == 64**3
    with torch.tpu.stream(torch.tpu.Stream()) as _:
        torch.tpu.current_stream().wait_stream(torch.tpu.default_stream())
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.tpu.Event().elapsed_time(last)


def test_an_event_cuts_nothing_until_it_is_asked_for() -> None:
    x = torch.ones(8, device=TPU)
    x.sum().item()
    flushes = len(LOG.of("flush"))
    y = x + 1
    event = torch.tpu.current_stream().record_event()
    torch.tpu.current_stream().wait_event(event)
    y = y * 2
    assert len(LOG.of("flush")) == flushes or DOORS[0].stream.config.mode != "fused"
    event.synchronize()
    assert event.query() and len(LOG.of("flush")) > flushes
    late = torch.tpu.Event()
    assert late.query()  # nobody has recorded it
    late.record()
    assert y.tolist() == [4.0] * 8 and late.query()


def test_a_queue_is_torchs_own_kind() -> None:
    queue = torch.tpu.Stream(TPU)
    assert isinstance(queue, torch.Stream) and queue != torch.tpu.current_stream() and queue.device == TPU
    torch.ones(3, device=TPU).record_stream(queue)


def test_each_thread_chooses_its_streams() -> None:
    first, second = torch.tpu.Stream(), torch.tpu.Stream()
    default = torch.tpu.default_stream()
    same = torch.tpu.Stream(stream_id=first.stream_id, device_index=0, device_type=first.device_type)
    assert len({first, second, default, same}) == 3 and torch.tpu.current_stream() == default
    seen = []
    with torch.tpu.stream(first):
        with second, torch.tpu.stream(None):
            assert torch.tpu.current_stream() == second == torch.accelerator.current_stream()
        assert torch.tpu.current_stream() == first
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [default] and torch.tpu.current_stream() == default
    torch.tpu.set_stream(second)
    assert torch.accelerator.current_stream() == second
    torch.accelerator.set_stream(default)
    assert torch.tpu.current_stream() == default


def test_a_stream_of_another_device_means_that_device() -> None:
    last = torch.tpu.device_count() - 1
    with torch.tpu.stream(torch.tpu.Stream(last)):
        assert torch.tpu.current_device() == last and torch.ones(2, device="tpu").get_device() == last
    assert torch.tpu.current_device() == 0


@pytest.mark.parametrize("copy", [lambda b, x: b.to(TPU, non_blocking=True), lambda b, x: x.copy_(b)], ids=["to", "in"])
def test_a_copy_in_a_stream_of_its_own_lets_the_others_begin_first(copy: Any) -> None:
    """As a prefetcher for CUDA copies: the next batch comes while this one is computed."""
    side, batch, x = torch.tpu.Stream(), torch.ones(8), torch.zeros(8, device=TPU)
    x.sum().item()
    flushes = len(LOG.of("flush"))
    y = (x + 1) * 2
    copied = copy(batch, x)
    is_fused = DOORS[0].stream.config.mode == "fused"
    assert len(LOG.of("flush")) == flushes or not is_fused
    with torch.tpu.stream(side):
        copied = copy(batch * 2, x)
    if is_fused:
        assert [e.data["reason"] for e in LOG.of("flush")[flushes:]] == ["cut.copy"]
    torch.tpu.current_stream().wait_stream(side)
    copied.record_stream(torch.tpu.current_stream())
    assert copied.tolist() == [2.0] * 8 and y.tolist() == [2.0] * 8


def test_ops_of_ones_own_have_torch_tpus_names() -> None:
    from torch.tpu.pallas import jax_op  # type: ignore[import-not-found,unused-ignore]

    @jax_op("backend_tests::doubled")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.tpu.pallas.jax_op is jax_op
    assert doubled(torch.ones(2, device=TPU)).tolist() == [2.0, 2.0]


def test_modes_have_torch_tpus_names() -> None:
    modes, before = torch.tpu.EagerMode, torch.tpu.eager_mode
    with torch.tpu.set_eager_mode(modes.DEFER_NEVER):
        assert torch.tpu.eager_mode is torch.tpu.get_eager_mode() is modes.DEFER_NEVER
        assert (torch.ones(3, device=TPU) + 1).tolist() == [2, 2, 2]
        torch.tpu.eager_mode = modes.DEFER_NEVER_AND_LAUNCH_BLOCKING
        assert torch.tpu.get_eager_mode() is modes.DEFER_NEVER_AND_LAUNCH_BLOCKING
    assert torch.tpu.eager_mode is before
    torch.tpu.set_eager_mode(modes.DEFER_NEVER)
    assert torch.tpu.eager_mode is modes.DEFER_NEVER
    torch.tpu.eager_mode = before


def test_a_device_that_is_off_defers_nothing_and_is_off_again_afterwards() -> None:
    before = DOORS[0].stream.config.mode
    set_options(mode="off")
    try:
        assert torch.tpu.eager_mode is torch.tpu.EagerMode.DEFER_NEVER
        assert (torch.ones(3, device=TPU) + 1).tolist() == [2, 2, 2]
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
            assert DOORS[0].stream.config.mode == "fused"
        assert DOORS[0].stream.config.mode == "off"
    finally:
        set_options(mode=before)


def test_memory_is_told_to_people_and_devices_are_meant_by_tensors() -> None:
    told = torch.tpu.memory_summary()
    assert "tpu:0" in told and "of living tensors" in told
    assert torch.tpu.max_memory_reserved() >= torch.tpu.memory_reserved() >= 0
    last = torch.tpu.device_count() - 1
    with torch.tpu.device_of(torch.ones(2, device=torch.device("tpu", last))):
        assert torch.tpu.current_device() == last
        with torch.tpu.device_of(torch.ones(2)):
            assert torch.tpu.current_device() == last
    assert torch.tpu.current_device() == 0


def test_the_most_memory_that_was_taken_is_counted_anew() -> None:
    gc.collect()  # what other tests have left would be let go in between
    x = torch.ones(1 << 20, device=TPU)
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.max_memory_allocated()
    assert before >= x.nbytes
    many = [x + number for number in range(3)]
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() >= before + 3 * x.nbytes
    del many
    most = torch.tpu.max_memory_allocated()
    assert before + 3 * x.nbytes <= most <= before + 5 * x.nbytes
    told = torch.tpu.memory_stats()
    assert told["allocated_bytes.all.peak"] == told["active_bytes.all.peak"] == most <= told["reserved_bytes.all.peak"]
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.memory_stats()["allocated_bytes.all.peak"] < most


def test_a_forked_child_is_refused_and_does_not_hang() -> None:
    x = torch.ones(3, device=TPU)
    x.sum().item()
    pid = os.fork()
    if pid == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 1)
        os._exit(0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 7
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the child hangs")
    assert (x + 1).tolist() == [2, 2, 2]


def test_tensors_of_the_device_in_a_context_for_those_of_the_cpu() -> None:
    from fused_eager import fused_eager

    here = torch.arange(4.0)
    with fused_eager(compile="wait", native="never"):
        doubled = here * 2
        there = (doubled + 1).to(TPU) * 3
        back = there.cpu() - doubled
    assert back.tolist() == [3, 7, 11, 15] and there.tolist() == [3, 9, 15, 21]


def test_a_context_may_step_aside_in_a_process_that_has_the_device() -> None:
    """What is pending on the device is no value of the host's, which a program could read past the context."""
    from fused_eager import fused_eager
    from fused_eager.frontends.context import bypass
    from fused_eager.frontends.context.threads import current_door

    there = torch.ones(3, device=TPU) + 1
    with fused_eager():
        door = current_door()
        assert door is not None and bypass._is_alone(door)
    assert there.tolist() == [2, 2, 2]


def test_one_name_for_each_process() -> None:
    import fused_eager

    assert fused_eager.register("tpu") == torch.tpu.device_count()
    with pytest.raises(fused_eager.FusedEagerError, match="has the device 'tpu' already"):
        fused_eager.register("xla")


def test_no_memory_is_torchs_error_and_names_the_line_and_the_largest_tensors() -> None:
    held = torch.ones(300, 1000, device=TPU) + 1
    held.sum().item()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        (torch.ones(1 << 20, 1, device=TPU) @ torch.ones(1, 1 << 26, device=TPU)).cumsum(0)[:2, 0].tolist()
    said = str(caught.value)
    assert "tpu:0 out of memory. Tried to allocate 256.00 TiB." in said and __file__.rpartition("/")[2] in said
    assert "float32 [300, 1000] (1.14 MiB)" in said
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, device=TPU)[:2].tolist()
    assert held.sum().item() == 600_000
    del caught
    assert torch.tpu.memory_allocated() < 1 << 30, "what could not be made takes no memory, and keeps itself alive"


def test_events_tell_the_time_between_them_and_are_not_waited_for_when_recorded() -> None:
    first, last = (torch.tpu.Event(enable_timing=True) for _ in range(2))
    x = torch.rand(1200, 1200, device=TPU)
    (x @ x).sum().item()
    began = time.perf_counter()
    first.record()
    y = x
    for _ in range(4):
        y = y @ x / 600
        y.mul_(1.0)  # what an event waits for may be overwritten
    last.record()
    if not last.query():  # a mode that waits has nothing left to wait for
        with pytest.raises(RuntimeError, match="must have happened"):
            first.elapsed_time(last)
    last.synchronize()
    assert last.query() and 0 < first.elapsed_time(last) <= (time.perf_counter() - began) * 1e3 + 1
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.tpu.Event().elapsed_time(last)
    with pytest.raises(RuntimeError, match="recorded"):
        torch.tpu.Event(enable_timing=True).elapsed_time(last)


def test_an_event_has_not_happened_because_its_value_was_overwritten() -> None:
    x = torch.rand(1200, 1200, device=TPU)
    x.sum().item()
    event = torch.tpu.Event()
    for _ in range(4):
        x = x @ x / 600
    event.record()
    x.add_(1)
    torch.tpu.current_stream().query()
    event.synchronize()
    assert event.query()


def test_what_is_asked_of_the_accelerator_is_asked_of_the_device() -> None:
    kept = torch.ones(1000, device="tpu") + 1
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated() >= 4000
    assert torch.accelerator.max_memory_allocated(0) >= kept.nbytes and torch.accelerator.memory_reserved() >= 4000
    assert torch.accelerator.max_memory_reserved() >= 4000 and isinstance(torch.accelerator.memory_stats(), dict)
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.empty_cache()


def test_the_accelerators_current_device_is_the_devices() -> None:
    last = torch.tpu.device_count() - 1
    torch.accelerator.set_device_index(last)
    assert torch.ones(1, device="tpu").get_device() == torch.accelerator.current_device_index() == last
    torch.accelerator.set_device_index(0)
    with torch.accelerator.device_index(last):
        assert torch.tpu.current_device() == last
    assert torch.tpu.current_device() == 0
    with pytest.raises(RuntimeError, match="no device 9"):
        torch.accelerator.set_device_index(9)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0])


def test_a_name_without_a_number_means_the_current_device_in_every_call() -> None:
    """Torch itself takes number 0 in some of them."""
    last, name = torch.tpu.device_count() - 1, torch.device("tpu")
    with torch.tpu.device(last):
        made = [
            torch.ones(2).to("tpu"), torch.ones(2).to(name), torch.ones(2).to(device="tpu"), torch.ones(2).tpu(),
            torch.ones(2).to("tpu", torch.float64), torch.tensor([1.0], device="tpu"), torch.ones(2, device="tpu"),
            torch.as_tensor([1.0], device=name), torch.nn.Linear(2, 2).to("tpu").weight, torch.rand(2, device="tpu"),
            torch.compile(lambda x: x.to("tpu") + torch.tensor([1.0], device="tpu"))(torch.ones(2)),
        ]  # fmt: skip
        with name:
            made += [torch.tensor([1.0]), torch.ones(2)]
        assert {t.get_device() for t in made} == {last}
        assert torch.ones(2).to("tpu:0").get_device() == torch.tensor([1.0], device="tpu:0").get_device() == 0
        assert torch.ones(2).to(torch.float64).is_cpu and torch.tensor([1.0]).is_cpu
        assert torch.jit.script(scripted_later)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert scripted(torch.ones(2)).tolist() == [2.0, 2.0]
    assert torch.ones(2).to("tpu").get_device() == torch.tensor([1.0], device="tpu").get_device() == 0


def scripted_later(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0])

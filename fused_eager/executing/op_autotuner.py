"""The op autotuner: which of ATen and XLA runs a heavy call faster, measured on this machine, for this call.

ATen's convolutions, sorts and scatters are written by hand, and on some processors and for some shapes far ahead of
what XLA makes of them; elsewhere it is the other way round. The best of both is faster than either: where ATen is
ahead by more than an island costs, the call becomes one, between two regions. Which calls may be one is a rule
(`AUTOTUNED`, and enough memory to be worth a look); who wins is measured while the stream that they belong to is being
compiled, on memory of their own, and kept like every measured choice. Whether the plan as a whole beats torch alone is
for `policy.autotuner` to find out.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fused_eager.cache import Key, Unencodable
from fused_eager.fusion_rules import cores, precision
from fused_eager.fusion_rules.deferred import xla_client
from fused_eager.fusion_rules.rule import AUTOTUNED, rule_for

from ..bounded import Bounded
from ..compiling import background, compile
from ..compiling.caching import Keeper
from ..compiling.compile import Settings
from ..compiling.executable import NotPortable
from ..compiling.key import Computation, identity
from ..devices.dlpack import to_array
from ..devices.home import Home, nbytes_of
from ..log.events import LOG
from ..log.reasons import Reason
from ..log.site import describe
from ..planning.order import operands
from ..planning.plan import Region
from ..planning.room import roomless, wanted
from ..policy.segment import Choice
from ..quiet import as_eager, unobserved
from ..tracing.stream import Node
from . import choices
from .arguments import hoisted
from .island import run_node

LEAST, MOST = 1 << 18, 1 << 28  # bytes that a call reads and writes: below it is not worth a cut, above not the memory
CUT = 3e-4  # seconds that an island costs: another region to be started, and passes over memory that fusing spares
AHEAD = 1.1  # times faster ATen has to be
RUNS, BUDGET = 3, 0.03  # runs of each, at least, and seconds after which no further one is begun

# What was found in this process; None where one of them cannot be measured.
_FOUND: Bounded[Hashable, Choice | None] = Bounded(4096)
_LOCK = threading.Lock()  # two at a time would measure each other


def islands(
    nodes: Sequence[Node], live: frozenset[int], homes: Mapping[int, Home], settings: Settings
) -> dict[int, str]:
    """The nodes that ATen runs so much faster that they are worth a cut, and why, in words.

    Measures what has not been measured before: seconds, on the thread that calls.
    """
    found = {}
    read = {v for node in nodes for v in operands(node)} | live
    for i, node in enumerate(nodes):
        results = tuple(r.vid for r in node.results if r.vid in read)
        if results and _is_autotuned(node, homes):
            inputs = tuple(dict.fromkeys(operands(node)))
            region = Region((i,), inputs, results, (), "xla", _ALONE)
            choice = _winner(Computation(nodes, region, homes), settings)
            if choice is not None and choice.native:
                found[i] = _words(choice)
    return found


_ALONE = Reason("mode.single")


def _is_autotuned(node: Node, homes: Mapping[int, Home]) -> bool:
    rule = rule_for(node.twin)
    # What is written in place stays with XLA: an island writes to a copy of all that it is part of.
    if rule is None or rule.cls not in AUTOTUNED or any(r.base is not None for r in node.results) or node.targets:
        return False
    if node.default is not torch.get_default_dtype():
        return False  # which is the whole process's
    touched = {*operands(node), *(r.vid for r in node.results)}
    return LEAST <= sum(nbytes_of(homes[v]) for v in touched) <= MOST


# A call is a computation of one node, with the results that are wanted of it.
def _winner(call: Computation, settings: Settings) -> Choice | None:
    key = identity(call, (settings.bounds, precision.switches(), torch.get_num_threads()))
    with _LOCK:
        if key not in _FOUND:
            _FOUND[key] = _remembered_or_measured(call, settings)
        return _FOUND[key]


def _remembered_or_measured(call: Computation, settings: Settings) -> Choice | None:
    kept = settings.keeper
    asked = _key(call, settings.bounds, kept) if isinstance(kept, Keeper) else None
    if not isinstance(kept, Keeper) or asked is None:
        return _told(call, _measured(call, settings))
    found = choices.find(kept, asked)
    if found is not None:
        return _told(call, found, remembered=True)
    made = _told(call, _measured(call, settings))
    if made is not None:
        choices.keep(kept, asked, made)
    return made


def _key(call: Computation, bounds: bool, kept: Keeper) -> Key | None:
    """What the compile cache knows the outcome by; None where there is no form that all would know."""
    try:
        name = kept.key(call, bounds).digest
        return choices.key((("call", name),), kept.salt, torch.get_num_threads())
    except Unencodable:
        return None


def _told(call: Computation, choice: Choice | None, remembered: bool = False) -> Choice | None:
    """The outcome, and the event log knows it."""
    if choice is not None:
        (node,) = call.chosen
        LOG.emit("op-choice", op=str(node.op), site=str(describe(node.place)), **asdict(choice), remembered=remembered)
    return choice


def _measured(call: Computation, settings: Settings) -> Choice | None:
    if background.is_closing():
        raise RuntimeError("the interpreter ends")
    try:
        with unobserved(), as_eager():
            inputs = {v: _made_up(call.homes[v]) for v in call.region.inputs}
            (node,) = call.chosen
            aten = _fastest(lambda: run_node(node, dict(inputs)), _clock(()))
            client, threads = _client()
            xla = _fastest(_through_xla(call, settings, list(inputs.values()), client), _clock(threads))
    except Exception as error:  # whoever runs it for the program raises where the program can be told
        LOG.count(f"op choice without a winner: {type(error).__name__}")
        return None
    return Choice(xla > AHEAD * aten + CUT, xla, aten)


def _through_xla(
    call: Computation, settings: Settings, inputs: list[torch.Tensor], client: Any
) -> Callable[[], object]:
    """What runs the call as a region of `client`, and waits for it."""
    device = client.devices()[0]
    floats, ints = hoisted(call.nodes, call.region)
    portable = compile.build(call, settings.bounds, settings.in_subprocess).portable
    if isinstance(portable, NotPortable):
        raise portable
    loaded = portable.load(device)
    given = [*inputs, torch.tensor(floats, dtype=torch.float64), torch.tensor(ints, dtype=torch.int64)]
    arrays = [to_array(t, device) for t in given]
    large = wanted(call.region, call.homes, settings.device)
    room = [to_array(torch.zeros(shape, dtype=dtype), device) for dtype, shape in large]
    places = roomless(call.region, call.homes, settings.device)

    def run() -> None:
        made = [array for (array,) in loaded.execute_sharded([*arrays, *room]).disassemble_into_single_device_arrays()]
        for array in made:
            array.block_until_ready()
        # That memory has been donated; what lies in it now makes room for the next run.
        room[:] = [made[p] for p in places]

    return run


@functools.cache
def _client() -> tuple[Any, tuple[int, ...]]:
    """XLA:CPU once more, and its threads: nothing but what is measured runs on them."""
    before = _threads()
    client = xla_client.make_cpu_client(asynchronous=False)
    return client, tuple(_threads() - before)


def _threads() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def _clock(threads: Sequence[int]) -> Callable[[], float]:
    """Seconds that the calling thread and `threads` have computed. Time on the wall would say how much of the processor
    the program leaves; only where there are several cores for one call it is what counts.
    """
    if not (sys.platform == "linux" and torch.get_num_threads() == cores.threads() == 1):
        return time.perf_counter
    # Linux counts for each thread: see MAKE_THREAD_CPUCLOCK in include/linux/posix-timers_types.h.
    clocks = [time.CLOCK_THREAD_CPUTIME_ID, *[(~thread << 3) | 6 for thread in threads]]
    return lambda: sum(map(time.clock_gettime, clocks))


def _fastest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest run but the first, which warms up; what else the machine does only makes one slower."""
    run()
    times: list[float] = []
    while len(times) < RUNS or (sum(times) < BUDGET and len(times) < 3 * RUNS):
        began = clock()
        run()
        times.append(clock() - began)
        if sum(times) > 10 * BUDGET:
            break
    return min(times)


def _made_up(home: Home) -> torch.Tensor:
    """Values to compute with: the program's own may be in use. Indices of zero are in range wherever any is."""
    dtype, shape = home
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.float32 if dtype.is_floating_point else torch.complex64
        return torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def _words(choice: Choice) -> str:
    return f"ATen is faster here: {choice.native_s * 1e3:.2g} ms, XLA {choice.fused_s * 1e3:.2g} ms (measured)"


def forget() -> None:
    """As if the process had just started."""
    _FOUND.clear()

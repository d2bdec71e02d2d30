"""Every public function of torch, called with tensors of the device: `python -m tests.fuzz.public --calls 8`.

No call may end the process, hang, or fail an assertion inside torch; what it returns must be readable; and where the
CPU returns something, the device returns the same. The calls run in processes of their own, and a call that ends one is
told by its name.

With `--context strict` they are called in a context of that mode instead, with pending tensors, and must raise what
they raise without it, in the same words and on the same line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fused_eager.fusion_rules.lowering import leaves

from .public_calls import ARBITRARY, EXPECTED, PENDING, Call, call_of, functions

ROOT = Path(__file__).resolve().parent.parent.parent
CONTEXTS: dict[str, dict[str, Any]] = {
    "default": {},
    "wait": {"compile": "wait", "native": "never"},
    "strict": {"mode": "strict"},
    "debug": {"mode": "debug"},
}
SECONDS = 60  # that a call may take, with compiling
# What torch says where an assertion of its own has failed.
INTERNAL = ("INTERNAL ASSERT", "please report a bug", "Internal error", "internal error")


def run(call: Call, function: Any, device: str) -> tuple[str, Any]:
    """Make a call. Returns the name of the exception, or "", and its text or else what the program can see of it. An
    exception that comes after the call, where the program looks, is "late"."""
    late = ""
    try:
        torch.manual_seed(0)
        args, kwargs = call.arguments(device)
        out = function(*args, **kwargs)
        late = "late "
        return "", [seen(x) for x in (out, args, kwargs, gradients(out, [args, kwargs]))]
    except Exception as error:
        told = f"{error}" + ("\n" + traceback.format_exc() if _is_ours(error) else "")
        return late + type(error).__name__, told


def run_pending(call: Call, function: Any, context: str) -> tuple[str, Any]:
    """The same in a context, with pending tensors."""
    try:
        with _open(context):
            return run(call, function, PENDING)
    except Exception as error:
        return f"late {type(error).__name__}", str(error)


def gradients(out: Any, given: Any) -> Any:
    """The gradients of what a call returned for the tensors that it was given."""
    outs = [t for t in leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad and t.layout is torch.strided]
    wanted = [t for t in leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if not outs or not wanted:
        return []
    total = sum((t.abs() if t.is_complex() else t).double().sum() for t in outs if not t.is_nested)
    if not isinstance(total, torch.Tensor):
        return []
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def _is_ours(error: BaseException) -> bool:
    """Whether the library's own code has made a mistake, and not found one."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    mistakes = (AssertionError, AttributeError, KeyError, TypeError, NameError, ZeroDivisionError, IndexError)
    inside = "/fused_eager/" in last.filename or "/fusion_rules/" in last.filename or "/jax/" in last.filename
    return inside and isinstance(error, mistakes) and "(raised by " not in str(error)


def seen(value: Any) -> Any:
    """What the program sees of a value, tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        repr(value)
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            return str(value.layout)
        if value.device.type == "meta":
            return "meta", value.dtype, tuple(value.shape)
        t = value.detach().cpu()
        return t.resolve_conj().resolve_neg(), value.dtype, tuple(value.shape), value.requires_grad
    if isinstance(value, (list, tuple)):
        return [seen(v) for v in value]
    if isinstance(value, dict):
        return {k: seen(v) for k, v in value.items()}
    if isinstance(value, (int, float, complex, bool, str, torch.dtype, torch.Size, type(None))):
        return value
    if isinstance(value, Iterator):
        return [seen(v) for v, _ in zip(value, range(20), strict=False)]
    repr(value)
    return type(value).__name__


def differs(want: Any, got: Any) -> str:
    """How what the device shows differs from what the CPU does; "" if it does not."""
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if want.shape != got.shape or want.dtype is not got.dtype:
            return f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
        rough = want.dtype in (torch.bfloat16, torch.float16)
        a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (want, got))
        if torch.allclose(a, b, rtol=0.03 if rough else 2e-3, atol=0.03 if rough else 2e-3, equal_nan=True):
            return ""
        return f"{got.flatten()[:6].tolist()} instead of {want.flatten()[:6].tolist()}"
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(want) != len(got):
            return f"{len(got)} values instead of {len(want)}"
        return next((found for a, b in zip(want, got, strict=True) if (found := differs(a, b))), "")
    if isinstance(want, dict) and isinstance(got, dict):
        return differs(list(want.values()), list(got.values()))
    if isinstance(want, (float, complex)) and isinstance(got, (float, complex)):
        close = abs(want - got) <= 2e-3 * (1 + abs(want)) or want == got
        return "" if close or (math.isnan(abs(want)) and math.isnan(abs(got))) else f"{got} instead of {want}"
    return "" if type(want) is type(got) else f"{type(got).__name__} instead of {type(want).__name__}"


def judge(call: Call, function: Any) -> tuple[str, str]:
    """Make a call on the CPU and on the device. Returns what is wrong, in a word and in a sentence; "right"
    or "" if nothing is."""
    device = torch._C._get_privateuse1_backend_name()
    on_cpu, want = run(call, function, "cpu")
    on_device, got = run(call, function, device)
    if on_device and any(words in got for words in INTERNAL):
        if on_cpu and any(words in want for words in INTERNAL):
            return "", ""
        return "internal", f"{on_device}: {got[:600]}"
    if on_device and "\n" in got and "Traceback" in got and not (on_cpu == on_device and "Traceback" in want):
        return "mistake", f"{on_device}: {got[-1500:]}"
    if call.name.startswith(tuple(EXPECTED)):
        return "", ""
    if on_cpu and not on_device:
        return "accepted", f"what the CPU refuses: {on_cpu}: {want[:300]}"
    if on_device and not on_cpu:
        return "refused", f"{on_device}: {got[:600]}"
    if on_cpu:
        return ("", "") if on_cpu == on_device else ("class", f"{on_device}: {got[:300]} for {on_cpu}: {want[:300]}")
    if any(word in call.name for word in ARBITRARY):
        return _RIGHT
    found = differs(want, got)
    return ("differs", found) if found else _RIGHT


def judge_pending(call: Call, function: Any, context: str) -> tuple[str, str]:
    """Make a call without a context and in one. Returns as `judge` does."""
    without, want = run(call, function, "cpu")
    within, got = run_pending(call, function, context)
    if without != within:
        kind = "class" if without else "refused"
        kind = "late" if within == f"late {without}" else kind if within else "accepted"
        return kind, f"{within}: {str(got)[:900]}\n  for {without}: {str(want)[:300]}"
    if without:
        same = _words(want) == _words(got)
        return ("", "") if same else ("words", f"{within}: {got[:600]}\n  for: {want[:300]}")
    if any(word in call.name for word in (*ARBITRARY, "fbgemm_")):
        return _RIGHT
    found = differs(want, got)
    return ("differs", found) if found else _RIGHT


def _open(context: str) -> contextlib.AbstractContextManager[Any]:
    from fused_eager import fused_eager

    return fused_eager(**CONTEXTS[context]) if context else contextlib.nullcontext()


def _words(text: str) -> str:
    """What an exception says, without where in torch it was raised."""
    return text.partition("\nException raised from")[0].partition("\nTraceback")[0].strip()


_RIGHT = "right", ""  # the CPU returned something, and the device the same


def work(names: list[str], calls: int, start: int, log: Path, context: str = "") -> None:
    """Make `calls` calls of each function; write each into the log before it is made, and what was wrong after it."""
    if not context:
        import fused_eager.tpu  # noqa: F401 - registers the device

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with _open(context):  # the methods that stand there meanwhile
        known = functions()
    with log.open("a", buffering=1) as out:
        for at, name in enumerate(names):
            function, parameters = known[name]
            for number in range(start if at == 0 else 0, calls):
                call = call_of(name, parameters, number)
                out.write(json.dumps({"call": [name, number]}) + "\n")
                if os.environ.get("FUZZ_END_AT") == f"{name} {number}":
                    os.abort()  # as a test wants to see it
                signal.alarm(SECONDS)
                kind, text = judge_pending(call, function, context) if context else judge(call, function)
                signal.alarm(0)
                if kind == "right":
                    out.write('{"right": 1}\n')
                elif kind:
                    row = {"found": kind, "of": [name, number], "text": text, "args": repr(call)}
                    out.write(json.dumps(row) + "\n")


def fuzz(names: list[str], calls: int, folder: Path, context: str = "") -> tuple[Counter[str], list[dict[str, Any]]]:
    """Call the functions in processes of their own, a new one after each that ends. Returns how many calls were made
    and how many of them the CPU took, and what was wrong."""
    found: list[dict[str, Any]] = []
    made: Counter[str] = Counter()
    start, left = 0, list(names)
    while left:
        log = folder / f"{len(list(folder.iterdir()))}.jsonl"
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.public", "--worker", str(log)]
        command += ["--calls", str(calls), "--start", str(start), "--names", ",".join(left), "--context", context]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        made.update(next(iter(row)) for row in rows)
        found += [row for row in rows if "found" in row]
        if done.returncode == 0:
            break
        last = next((row["call"] for row in reversed(rows) if "call" in row), None)
        if last is None:
            raise RuntimeError(f"the process of {left[0]} did not begin: {done.stderr[-3000:]}")
        kind = "hang" if done.returncode == -signal.SIGALRM else "crash"
        found.append({"found": kind, "of": last, "text": f"{done.returncode}: {done.stderr[-1500:]}", "args": ""})
        left, start = left[left.index(last[0]) :], last[1] + 1
        if start >= calls:
            left, start = left[1:], 0
    return made, found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.public", description=__doc__)
    parser.add_argument("--calls", type=int, default=8, help="of each function")
    parser.add_argument("--names", default="", help="comma-separated; all by default")
    parser.add_argument("--one-in", type=int, default=1, help="every n-th function alone")
    parser.add_argument("--kinds", default="", help="comma-separated: print what was found of these kinds alone")
    parser.add_argument("--context", default="", choices=["", *CONTEXTS], help="in a context of this mode, on the CPU")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = [n for n in args.names.split(",") if n]
    if args.worker:
        work(names, args.calls, args.start, args.worker, args.context)
        return 0
    if not args.context:
        import fused_eager.tpu  # noqa: F401 - torch.tpu is one of the modules

    names = names or list(functions())[:: args.one_in]
    with tempfile.TemporaryDirectory() as folder:
        made, found = fuzz(names, args.calls, Path(folder), args.context)
    for row in found:
        if not args.kinds or row["found"] in args.kinds.split(","):
            print(f"{row['found'].upper()} {row['of'][0]} {row['of'][1]}\n  {row['args'][:600]}\n  {row['text']}")
    wrong = dict(Counter(row["found"] for row in found))
    print(f"{len(names)} functions, {made['call']} calls, {made['right']} of them right on the CPU; wrong: {wrong}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

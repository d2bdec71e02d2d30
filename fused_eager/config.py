"""Every option of the library, once.

A row of `Config` is the whole definition of an option: its name, type, default, allowed values and one line of help.
The environment variable, the parser, the checks, the error texts and what `python -m fused_eager config` prints follow
from the row, so adding an option is adding a row.

A value comes from the first of: an explicit argument, the environment variable, the default. An explicit None, and an
environment variable that is empty, mean "not given". Text (from the environment or a command line) is parsed once,
here; an argument must already have the option's type.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

from .errors import FusedEagerError

PREFIX = "FUSED_EAGER_"

Mode = Literal["debug", "strict", "fused", "off"]


class OptionError(FusedEagerError, ValueError):
    """A wrong option name or value. The text says what was given, where it came from and what is allowed."""


def _row(default: Any, help: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "minimum": minimum, "maximum": maximum})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of one context. One that exists is valid: a wrong value raises `OptionError` at construction."""

    mode: Mode = _row("fused", "how ops run: one at a time and checked, one at a time, in fused regions, or untouched")
    compile: Literal["auto", "wait", "blocking"] = _row(
        "auto",
        "auto: ATen runs what is not compiled yet, and only what comes again is compiled; wait: the program waits for "
        "the compiler; blocking: and nothing is chosen by measured time, so that runs are reproducible bit for bit",
    )
    deterministic: bool | None = _row(
        None,
        "the same program computes the same bits in every run: compile is blocking; auto: where "
        "torch.use_deterministic_algorithms is on as the context is entered",
    )
    compiler: Literal["process", "thread"] = _row(
        "process",
        "where XLA compiles for the processor: in a process of its own, which takes the memory and ends at once; or in "
        "a thread of this one",
    )
    max_pending: int = _row(4096, "ops that may be pending before they are run without being asked for", minimum=1)
    max_region: int = _row(1024, "ops that one region may hold", minimum=1)
    log: Literal["", "ops", "plans"] = _row("", "print each op with its shapes and call site, or each plan")
    check_nan: bool = _row(False, "find the op that first makes a NaN or an infinity (in mode debug)")
    check_bounds: bool = _row(True, "raise for an index that is out of range")
    verify: float = _row(
        0.0, "fraction of the regions that ATen runs again to compare the values, 0 to 1", minimum=0, maximum=1
    )
    islands: Literal["allow", "warn", "refuse"] = _row(
        "allow", "ops that run natively between regions: silent, said once per op, or an error"
    )
    native: Literal["measured", "never"] = _row(
        "measured",
        "run ops natively between two reads of values where that was measured to be faster (in mode fused, and where "
        "neither `verify` nor `islands` want regions to run)",
    )
    follower: Literal["auto", "python", "compiled"] = _row(
        "auto",
        "who follows ops that come again: C++ as soon as it is built, in the background where there is a compiler; "
        "Python; or C++, which the program waits for (in mode fused)",
    )
    platform: str = _row("", "what JAX computes on for the device: tpu, cuda, rocm, cpu; empty: the best it finds")
    devices: int = _row(
        0,
        "devices of the type `tpu`; 0: all that JAX finds (where the CPU stands in: one, or as many as a launcher has "
        "started processes on the machine)",
        minimum=0,
    )
    rng: Literal["device", "torch_cpu"] = _row(
        "device",
        "which random numbers a device draws: its own, the same on every platform; or those of CPU tensors",
    )
    report: str = _row("", "file that the event log is written to as the program runs; empty: none")
    cache: str = _row("", "shared stores of compiled regions: URLs, nearest first, with commas; off: keep nothing")
    cache_dir: str = _row("", "folder of this host's compiled regions; empty: fused_eager in the XDG cache folder")
    cache_bytes: int = _row(8 << 30, "bytes that folder may hold; 0: no folder, only the shared stores", minimum=0)
    cache_keys: str = _row("", "file with the keys that sign and verify entries of shared stores, or env:VARIABLE")
    cache_unsigned: bool = _row(False, "believe unsigned entries too: whoever can write to a shared store is trusted")
    cache_salt: str = _row("", "any text; entries made with another text are not used")
    cache_wait: float = _row(60.0, "seconds to wait for another process that compiles the same region", minimum=0)
    cache_timeout: float = _row(5.0, "seconds that one read from a shared store may take", minimum=0.01)
    cache_lease: float = _row(10.0, "seconds after which a process that died while compiling is replaced", minimum=0.1)
    heartbeat: float = _row(
        10.0, "seconds of silence after which another rank of a distributed job is lost; 0: nobody watches", minimum=0
    )
    arrival: float = _row(
        60.0, "seconds that a rank may come later than the others to make a process group", minimum=0.1
    )
    collectives: Literal["host", "xla", "regions"] = _row(
        "host",
        "who does the collectives of device tensors between processes: the host's group (gloo); or XLA, over what "
        "connects the devices, each by itself (xla) or inside of regions where all ranks run the same ones (regions)",
    )
    check_collectives: bool | None = _row(
        None, "compare the order of collectives between ranks, before each of them; auto: in mode debug"
    )
    validate: bool | None = _row(None, "check what each stage hands on; auto: in modes debug and strict")
    progress: bool = _row(True, "after one second of waiting, say what is being waited for")

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            option.check(getattr(self, name))

    def replace(self, **options: object) -> Config:
        """This configuration with `options` (name to value; None: leave as it is) changed.

        Raises `OptionError` for a name that does not exist or a value that is not allowed.
        """
        for name in options:
            find(name)
        given: dict[str, Any] = {name: _as_text(value) for name, value in options.items() if value is not None}
        return dataclasses.replace(self, **given) if given else self

    def refuse_unused(self) -> None:
        """Raise `OptionError` for an option that this mode would ignore, and whoever gave it would rely on."""
        if self.check_nan and self.mode in ("fused", "strict"):
            raise OptionError(
                f"option 'check_nan' needs mode 'debug', and this context is in mode {self.mode!r}: values exist there "
                "only when they are asked for"
            )

    @property
    def measures(self) -> bool:
        """Whether segments of the program may run natively because that was measured to be faster."""
        return self.mode == "fused" and not (self.compiles_all or self.is_reproducible)

    @property
    def waits(self) -> bool:
        """Whether the program waits for the compiler."""
        return self.mode != "fused" or self.compile != "auto" or self.is_reproducible or self.inspects

    @property
    def is_reproducible(self) -> bool:
        """Whether nothing may be chosen by measured time, nor by what came before."""
        return bool(self.deterministic) or self.compile == "blocking"

    @property
    def compiles_all(self) -> bool:
        """Whether whatever can be compiled is to be, though it does not pay."""
        return self.native == "never" or self.inspects

    @property
    def inspects(self) -> bool:
        """Whether all ops are to be recorded and all regions to run: who refuses islands has to be told where they are,
        and who has regions verified wants them to run.
        """
        return self.islands != "allow" or self.verify > 0

    @property
    def in_subprocess(self) -> bool:
        """Whether XLA compiles in a process of its own, where it can."""
        return self.compiler == "process"

    @property
    def checks_collectives(self) -> bool:
        """Whether ranks compare the order of their collectives."""
        return self.mode == "debug" if self.check_collectives is None else self.check_collectives

    @property
    def validates(self) -> bool:
        """Whether the stages check their results: `validate`, or what the mode says where that is None."""
        return self.mode in ("debug", "strict") if self.validate is None else self.validate


@dataclass(frozen=True, slots=True)
class Kind:
    """What the values of one type look like: in words, from text, and as a value."""

    words: str
    parse: Callable[[str], Any]  # raises ValueError
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Option:
    """One row of `Config`, as data."""

    name: str
    kind: Kind
    default: Any
    help: str

    @property
    def env(self) -> str:
        """The environment variable that sets the option."""
        return PREFIX + self.name.upper()

    def parse(self, text: str, origin: str) -> Any:
        """The value that `text` spells; `origin` is where the text came from, in words. Raises `OptionError`."""
        try:
            value = self.kind.parse(text)
        except ValueError:
            raise self._refusal(text, origin) from None
        if not self.kind.accepts(value):
            raise self._refusal(text, origin)
        return value

    def check(self, value: object, origin: str = "an argument") -> None:
        """Raise `OptionError` unless `value` is one of the option's."""
        if not self.kind.accepts(value):
            raise self._refusal(value, origin)

    def _refusal(self, given: object, origin: str) -> OptionError:
        return OptionError(
            f"option {self.name!r} cannot be {given!r} (from {origin}); allowed: {self.kind.words}; "
            f"default: {as_option(self.default)}"
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one option now, and where it came from: "argument", "default", or the environment variable."""

    option: Option
    value: Any
    origin: str


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _number(kind: type, words: str, minimum: float | None, maximum: float | None) -> Kind:
    low, high = -math.inf if minimum is None else minimum, math.inf if maximum is None else maximum
    limits = [f"at least {minimum}"] * (minimum is not None) + [f"at most {maximum}"] * (maximum is not None)

    def accepts(value: Any) -> bool:
        # bool is an int to Python; max_region=True is a mistake. An int is a fine float.
        right = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return right and low <= value <= high and abs(value) != math.inf

    return Kind(" ".join([words, " and ".join(limits)]).strip(), kind, accepts)


def _choice(values: tuple[str, ...]) -> Kind:
    words = ", ".join(value or '"" (nothing)' for value in values)
    return Kind(words, str, lambda value: isinstance(value, str) and value in values)


def _kind(annotation: Any, row: dataclasses.Field[Any]) -> Kind:
    low, high = row.metadata["minimum"], row.metadata["maximum"]
    if annotation is int:
        return _number(int, "a whole number", low, high)
    if annotation is float:
        return _number(float, "a number", low, high)
    if annotation is bool:
        return Kind("true, false (1/0, yes/no, on/off)", _parse_bool, lambda value: isinstance(value, bool))
    if annotation == bool | None:
        return Kind(
            "true, false (1/0, yes/no, on/off), auto",
            lambda text: None if text.strip().lower() == "auto" else _parse_bool(text),
            lambda value: value is None or isinstance(value, bool),
        )
    if annotation is str:
        return Kind("any text", str, lambda value: isinstance(value, str))
    choices = get_args(annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return _choice(choices)
    raise TypeError(f"no parser for the type of option {row.name!r}: {annotation}")


def _options() -> Mapping[str, Option]:
    types = get_type_hints(Config)
    rows = dataclasses.fields(Config)
    return MappingProxyType(
        {row.name: Option(row.name, _kind(types[row.name], row), row.default, row.metadata["help"]) for row in rows}
    )


OPTIONS: Mapping[str, Option] = _options()
_RAW_PREFIX = PREFIX.encode() if os.name == "posix" else None
_ENVS = {option.env: option for option in OPTIONS.values()}


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def as_option(value: object) -> str:
    """The text that parses to `value`."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) or '""'


def find(name: str, origin: str = "an argument") -> Option:
    """The option called `name`. Raises `OptionError` with the nearest name and all of them."""
    if name in OPTIONS:
        return OPTIONS[name]
    if name == "target":
        raise OptionError(
            "there is no option 'target': tensors have values after a context, and for chips that are not here there "
            "are none. Commands run a program for them, in a process of its own: `python -m fused_eager warm --target "
            "v5e:2x2 script.py` compiles its regions, `python -m fused_eager forecast` says what they would take"
        )
    raise OptionError(_unknown("option", name, origin, list(OPTIONS)))


def _unknown(what: str, given: str, origin: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"there is no {what} {given!r} (from {origin}){hint} Known: {', '.join(known)}"


def _environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables in `environ` that set an option, and their texts. Refuses unknown ones."""
    # A context may be entered in a loop: the names are looked through as the system has them, all at once.
    raw = getattr(environ, "_data", None)
    if type(raw) is dict and _RAW_PREFIX is not None and _RAW_PREFIX not in b"\0".join(raw):
        return ()
    given = sorted(name for name in environ if name.startswith(PREFIX))
    for name in given:
        if name not in _ENVS:
            raise OptionError(_unknown("environment variable", name, "the environment", list(_ENVS)))
    return tuple((name, environ[name]) for name in given)


_parsed: dict[tuple[tuple[str, str], ...], Config] = {}


def _from_environment(environ: Mapping[str, str]) -> Config:
    texts = _environment(environ)
    # A context may be entered in a loop: the texts of the last few environments are parsed once.
    config = _parsed.get(texts)
    if config is None:
        if len(_parsed) >= 64:
            _parsed.clear()
        options = ((_ENVS[env], text) for env, text in texts if text)
        values = {row.name: row.parse(text, f"environment variable {row.env}") for row, text in options}
        config = _parsed[texts] = Config(**values)
    return config


def resolve(options: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration that `options` (name to typed value; None: not given) and `environ` (`os.environ`) make.

    Raises `OptionError` for an unknown option or FUSED_EAGER variable, or a value that is not allowed, even where a
    stronger source would have hidden it.
    """
    config = _from_environment(os.environ if environ is None else environ)
    return config.replace(**options) if options else config


# Torch's own words for how much a compiler may do, and the options they stand for.
_COMPILED: dict[str, dict[str, object]] = {
    "default": {"compile": "wait"},
    "reduce-overhead": {"compile": "wait"},
    "max-autotune": {},  # heavy calls are measured, and left to ATen where that is faster
    "max-autotune-no-cudagraphs": {},
}


def of_compiled(mode: str | None, options: Mapping[str, object] | None) -> Config:
    """The options of a function of `torch.compile`. Raises `OptionError` for a mode or an option that there is not."""
    if (mode or "default") not in _COMPILED:
        raise OptionError(f"there is no mode {mode!r} of torch.compile's; allowed: {', '.join(_COMPILED)}")
    return resolve({**_COMPILED[mode or "default"], **(options or {})})


def settings(
    options: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Setting, ...]:
    """Every option with its value and where that came from, in the registry's order. Raises as `resolve` does."""
    environ = os.environ if environ is None else environ
    config = resolve(options, environ)
    given = {name for name, value in (options or {}).items() if value is not None}
    rows = []
    for option in OPTIONS.values():
        origin = "argument" if option.name in given else option.env if environ.get(option.env) else "default"
        rows.append(Setting(option, getattr(config, option.name), origin))
    return tuple(rows)


def parse_assignment(text: str, origin: str) -> tuple[str, Any]:
    """Name and typed value of a "name=value" from a command line. Raises `OptionError`."""
    name, equals, value = text.partition("=")
    option = find(name.strip().replace("-", "_"), origin)
    if not equals:
        raise OptionError(f"{text!r} (from {origin}) names no value; write {option.name}=VALUE: {option.kind.words}")
    return option.name, option.parse(value, origin)


def describe(rows: tuple[Setting, ...]) -> str:
    """The registry with its values now, for a person."""
    lines = []
    for row in rows:
        option = row.option
        lines.append(f"{option.name} = {as_option(row.value)}   ({row.origin})")
        lines.append(f"    {option.help}")
        lines.append(f"    {option.kind.words}; default {as_option(option.default)}; {option.env}")
    return "\n".join(lines)


def main(argv: list[str], prog: str) -> int:
    """`config`: print the registry with the values that a program started now would get."""
    parser = argparse.ArgumentParser(prog=prog, description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects, one for each option")
    arguments = parser.parse_args(argv)
    try:
        rows = settings()
    except OptionError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        fields = [
            {
                "name": row.option.name,
                "value": row.value,
                "origin": row.origin,
                "default": row.option.default,
                "allowed": row.option.kind.words,
                "environment": row.option.env,
                "help": row.option.help,
            }
            for row in rows
        ]
        print(json.dumps(fields, indent=2))
    else:
        print(describe(rows))
    return 0

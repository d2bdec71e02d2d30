"""The registry of options: sources and their order, refusals, and that a row is all an option needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fused_eager import config
from fused_eager.config import (
    OPTIONS,
    Config,
    OptionError,
    as_option,
    describe,
    find,
    parse_assignment,
    resolve,
    settings,
)

# One value of each option that is not its default, as text and as value.
OTHER: dict[str, tuple[str, Any]] = {
    "mode": ("strict", "strict"),
    "compile": ("blocking", "blocking"),
    "deterministic": ("true", True),
    "compiler": ("thread", "thread"),
    "max_pending": ("17", 17),
    "max_region": ("1", 1),
    "log": ("plans", "plans"),
    "check_nan": ("yes", True),
    "check_bounds": ("OFF", False),
    "verify": ("0.25", 0.25),
    "islands": ("refuse", "refuse"),
    "native": ("never", "never"),
    "follower": ("python", "python"),
    "platform": ("cpu", "cpu"),
    "devices": ("4", 4),
    "rng": ("torch_cpu", "torch_cpu"),
    "report": ("out/run.jsonl", "out/run.jsonl"),
    "cache": ("/a,redis://b/0", "/a,redis://b/0"),
    "cache_dir": ("/tmp/regions", "/tmp/regions"),
    "cache_bytes": ("0", 0),
    "cache_keys": ("env:KEYS", "env:KEYS"),
    "cache_unsigned": ("on", True),
    "cache_salt": ("team a", "team a"),
    "cache_wait": ("2.5", 2.5),
    "cache_timeout": ("1", 1.0),
    "cache_lease": ("3", 3.0),
    "heartbeat": ("2.5", 2.5),
    "arrival": ("5", 5.0),
    "collectives": ("xla", "xla"),
    "check_collectives": ("on", True),
    "validate": ("0", False),
    "progress": ("no", False),
}


def test_the_examples_cover_every_option() -> None:
    assert set(OTHER) == set(OPTIONS) == {row.name for row in dataclasses.fields(Config)}


def test_defaults() -> None:
    config = resolve({}, {})
    assert config == Config()
    assert config.mode == "fused" and config.compile == "auto" and config.native == "measured"
    assert (config.max_pending, config.max_region, config.check_bounds, config.validate) == (4096, 1024, True, None)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_has_a_variable_one_line_of_help_and_allowed_values(name: str) -> None:
    option = OPTIONS[name]
    assert option.env == "FUSED_EAGER_" + name.upper()
    assert option.help and "\n" not in option.help
    assert option.kind.words
    option.check(option.default)


@pytest.mark.parametrize("name", OPTIONS)
def test_environment_beats_the_default_and_an_argument_beats_both(name: str) -> None:
    option, (text, value) = OPTIONS[name], OTHER[name]
    environ = {option.env: text}
    assert getattr(resolve({}, environ), name) == value
    assert getattr(resolve({name: None}, environ), name) == value
    assert getattr(resolve({name: value}, {}), name) == value
    if option.default is not None:
        assert getattr(resolve({name: option.default}, environ), name) == option.default
    others = dataclasses.asdict(resolve({}, environ))
    del others[name]
    assert others == {row.name: row.default for row in OPTIONS.values() if row.name != name}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_empty_variable_is_not_given(name: str) -> None:
    assert resolve({}, {OPTIONS[name].env: ""}) == Config()


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_printed_parses_to_the_same_value(name: str) -> None:
    option = OPTIONS[name]
    for value in (option.default, OTHER[name][1]):
        text = as_option(value)
        assert value == ("" if text == '""' else option.parse(text, "test"))


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("mode", "fast", "debug, strict, fused, off"),
        ("mode", "Fused", "debug, strict, fused, off"),
        ("compile", "later", "auto, wait, blocking"),
        ("max_pending", "many", "a whole number at least 1"),
        ("max_pending", "0", "a whole number at least 1"),
        ("max_region", "1.5", "a whole number at least 1"),
        ("check_nan", "maybe", "true, false (1/0, yes/no, on/off)"),
        ("validate", "maybe", "auto"),
    ],
)
def test_wrong_text_is_refused_with_what_where_and_the_allowed(name: str, text: str, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve({}, {OPTIONS[name].env: text})
    for part in (repr(name), repr(text), f"environment variable {OPTIONS[name].env}", allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "fast"),
        ("mode", 3),
        ("max_region", 0),
        ("max_region", True),
        ("max_region", "7"),
        ("max_region", 2.0),
        ("check_nan", 1),
        ("check_nan", "yes"),
        ("validate", "auto"),
        ("report", 5),
        ("log", True),
        ("log", []),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: object) -> None:
    for attempt in (lambda: resolve({name: value}, {}), lambda: Config().replace(**{name: value})):
        with pytest.raises(OptionError, match=name) as caught:
            attempt()
        assert repr(value) in str(caught.value)
        assert "an argument" in str(caught.value)


def test_no_wrong_configuration_can_exist() -> None:
    with pytest.raises(OptionError, match="mode"):
        Config(mode="fast")  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().mode = "off"  # type: ignore[misc]


def test_a_wrong_variable_is_refused_even_where_an_argument_would_hide_it() -> None:
    with pytest.raises(OptionError, match="FUSED_EAGER_MODE"):
        resolve({"mode": "strict"}, {"FUSED_EAGER_MODE": "fast"})


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"'max_regions' \(from an argument\); did you mean 'max_region'\?"):
        resolve({"max_regions": 3}, {})
    with pytest.raises(OptionError, match="max_regions"):
        Config().replace(max_regions=None)
    with pytest.raises(OptionError, match=r"'FUSED_EAGER_MOED' .* did you mean 'FUSED_EAGER_MODE'\?"):
        resolve({}, {"FUSED_EAGER_MOED": "strict"})
    with pytest.raises(OptionError) as caught:
        find("zzz")
    assert "did you mean" not in str(caught.value)
    assert "(from an argument). Known: mode" in str(caught.value)
    assert all(name in str(caught.value) for name in OPTIONS)


def test_a_target_is_no_option_and_the_error_says_what_to_run() -> None:
    with pytest.raises(OptionError, match=r"warm --target v5e:2x2 script\.py"):
        resolve({"target": "v5e:2x2"}, {})


def test_an_unknown_variable_is_noticed_when_it_appears_later() -> None:
    environ = {"FUSED_EAGER_MODE": "strict"}
    resolve({}, environ)
    environ["FUSED_EAGER_MOED"] = "off"
    with pytest.raises(OptionError, match="MOED"):
        resolve({}, environ)


def test_the_real_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("debug", "off", "debug"):
        monkeypatch.setenv("FUSED_EAGER_MODE", mode)
        assert resolve().mode == mode


def test_text_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(config.Option, "parse", lambda self, text, origin: calls.append(text) or int(text))
    monkeypatch.setattr(config, "_parsed", {})
    for _ in range(3):
        assert resolve({}, {"FUSED_EAGER_MAX_REGION": "12345"}).max_region == 12345
    assert calls == ["12345"]


def test_replace() -> None:
    strict = Config().replace(mode="strict", max_region=3, check_nan=None)
    assert (strict.mode, strict.max_region, strict.check_nan) == ("strict", 3, False)
    assert strict.replace() is strict
    assert strict.replace(mode=None) == strict
    assert strict.replace(mode="fused").max_region == 3
    assert hash(strict) == hash(Config(mode="strict", max_region=3))


def test_paths_are_accepted_where_text_is() -> None:
    assert Config().replace(report=Path("a") / "b").report == str(Path("a") / "b")


@pytest.mark.parametrize(
    ("mode", "validate", "validates"),
    [
        ("debug", None, True),
        ("strict", None, True),
        ("fused", None, False),
        ("fused", True, True),
        ("debug", False, False),
    ],
)
def test_validators_follow_the_mode_unless_told(mode: Any, validate: bool | None, validates: bool) -> None:
    assert Config(mode=mode, validate=validate).validates is validates


def test_settings_say_where_each_value_comes_from() -> None:
    rows = {row.option.name: row for row in settings({"mode": "off", "log": None}, {"FUSED_EAGER_LOG": "ops"})}
    assert (rows["mode"].value, rows["mode"].origin) == ("off", "argument")
    assert (rows["log"].value, rows["log"].origin) == ("ops", "FUSED_EAGER_LOG")
    assert (rows["cache"].value, rows["cache"].origin) == ("", "default")
    assert list(rows) == list(OPTIONS)
    text = describe(tuple(rows.values()))
    for name, option in OPTIONS.items():
        assert f"{name} = " in text and option.env in text and option.help in text


def test_assignments_from_a_command_line() -> None:
    assert parse_assignment("max_region=8", "--option") == ("max_region", 8)
    assert parse_assignment("check-nan=on", "--option") == ("check_nan", True)
    assert parse_assignment("cache=http://h/?a=b", "--option") == ("cache", "http://h/?a=b")
    assert parse_assignment("report=", "--option") == ("report", "")
    with pytest.raises(OptionError, match=r"--option.*did you mean 'mode'"):
        parse_assignment("mod=strict", "--option")
    with pytest.raises(OptionError, match="names no value"):
        parse_assignment("mode", "--option")
    with pytest.raises(OptionError, match=r"'x' \(from --option\)"):
        parse_assignment("max_region=x", "--option")


def test_a_fraction_is_one_row_too() -> None:
    row = config._row(0.0, "h", minimum=0, maximum=1)
    rows = dataclasses.fields(dataclasses.make_dataclass("C", [("p", float, row)]))
    option = config.Option("p", config._kind(float, rows[0]), 0.0, "h")
    assert option.parse("0.25", "test") == 0.25
    option.check(1)
    for wrong in ("1.5", "-0.1", "nan", "x"):
        with pytest.raises(OptionError, match="a number at least 0 and at most 1"):
            option.parse(wrong, "test")


def test_a_row_whose_type_has_no_parser_is_an_error_at_import() -> None:
    rows = dataclasses.fields(dataclasses.make_dataclass("C", [("p", list, config._row(None, "h"))]))
    with pytest.raises(TypeError, match="no parser for the type of option 'p'"):
        config._kind(list, rows[0])


def test_the_command_prints_the_registry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_EAGER_MODE", "strict")
    assert config.main([], "config") == 0
    assert "mode = strict   (FUSED_EAGER_MODE)" in capsys.readouterr().out
    assert config.main(["--json"], "config") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mode"]["value"] == "strict" and rows["mode"]["default"] == "fused"
    assert rows["mode"]["environment"] == rows["mode"]["origin"] == "FUSED_EAGER_MODE"
    monkeypatch.setenv("FUSED_EAGER_MODE", "fast")
    assert config.main([], "config") == 2
    assert "'fast'" in capsys.readouterr().err

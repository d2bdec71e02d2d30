"""The benchmarks run every workload, believe no wrong result, and render what they measured."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    check,
    client_programs,
    clients,
    entering,
    environment,
    first_minute,
    first_steps,
    index_checks,
    measure,
    model_programs,
    probe,
    ranks_over_plain,
    table,
)
from benchmarks.programs import PROGRAMS
from benchmarks.systems import REFERENCE, SYSTEMS, System
from benchmarks.turns import TURN_S
from benchmarks.workloads import ROWS, WORKLOADS, Workload, select

BRIEF = measure.Effort(rounds=2, block_s=1e-4, settle_s=5.0)
EVERYDAY = {row.name: row for row in PROGRAMS}
ALL = {**WORKLOADS, **EVERYDAY}
# Rows that differ at full size only are the same work when tiny.
DISTINCT = sorted({(row.setup.__name__, *row.tiny.items()): name for name, row in WORKLOADS.items()}.values())


@pytest.mark.parametrize("name", ALL)
def test_equal_seeds_give_equal_finite_results(name: str) -> None:
    runner, first = measure.first_results(ALL[name], REFERENCE, "tiny")
    _, second = measure.first_results(ALL[name], REFERENCE, "tiny")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(a.isfinite().all() for a in first)
    assert isinstance(runner.once(), float) == ALL[name].trains


@pytest.mark.parametrize("name", ALL)
def test_rows_say_whether_their_steps_draw_random_numbers(name: str) -> None:
    step = ALL[name].build(REFERENCE.wrap, "tiny")
    before = torch.get_rng_state()
    step()
    assert ALL[name].draws != torch.equal(torch.get_rng_state(), before)


def test_names_are_unique_and_sizes_go_by_the_same_names() -> None:
    assert len(ALL) == len(ROWS) + len(PROGRAMS)
    assert all(row.full.keys() == row.tiny.keys() for row in PROGRAMS)


LONG = ("resnet18_train_128", "layers_24")  # a quarter of a minute each; steady loops train a ResNet and a GPT
LONG_STRICT = ("resnet18_forward_128", "ragged_elementwise", "ragged_layernorm", "decode_256")


def _in_both(row: tuple[str, str]) -> Any:
    # A model's ops, one region each, take as long to compile as all other rows; `make test` trains the examples so.
    slow = row[0] in LONG if row[1] == "fused" else WORKLOADS[row[0]].trains or row[0] in LONG_STRICT
    return pytest.param(*row, marks=[pytest.mark.slow] if slow else [])


def _everyday(row: Workload) -> Any:
    # Models take seconds to compile; `make test` trains enough others.
    slow = row.setup.__module__ == model_programs.__name__
    return pytest.param(row.name, "fused", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "system"),
    [
        *map(_in_both, product(DISTINCT, ("fused", "strict"))),
        *map(_everyday, PROGRAMS),
        ("mlp_adam_loop", "compile_fused"),
    ],
)
def test_our_modes_compute_what_eager_computes(name: str, system: str) -> None:
    workload = ALL[name]
    _, plain = measure.first_results(workload, REFERENCE, "tiny")
    _, ours = measure.first_results(workload, SYSTEMS[system], "tiny")
    worst, equal = measure.compare(workload, SYSTEMS[system], ours, plain)
    assert equal, f"off by {worst}"


# Between its blocks the collector runs, which takes a second where thousands of tests have run; one way of measuring
# does for all, so `make test` takes a step that is synchronized and one that trains.
MEASURED = [n if n in ("tiny", "mlp_adam_loop") else pytest.param(n, marks=pytest.mark.slow) for n in DISTINCT]


@pytest.mark.parametrize("name", MEASURED)
def test_every_workload_is_measured_and_rendered(name: str) -> None:
    workload = WORKLOADS[name]
    twin = replace(REFERENCE, name="twin")
    timings = measure.measure(workload, [twin], BRIEF, "tiny")
    assert timings["eager"].ratio == 1.0
    assert timings["twin"].failure == ""
    assert timings["twin"].difference == 0.0
    assert timings["twin"].seconds > 0
    text = table.render([table.Row(name, workload.about, workload.trains, timings)], ["eager", "twin"])
    assert len(text.splitlines()) == 3
    assert name in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["layers_2"], ["layers_2"]),
        (["layers"], ["layers_2", "layers_6", "layers_12", "layers_24"]),
        (["tiny", "mlp", "tiny"], ["tiny", "mlp_adam_foreach", "mlp_adam_loop"]),
        ([], list(WORKLOADS)),
    ],
)
def test_workloads_are_chosen_by_name_or_beginning(arguments: list[str], expected: list[str]) -> None:
    assert [row.name for row in select(arguments)] == expected


def test_programs_are_chosen_as_workloads_are() -> None:
    assert [row.name for row in select(["kmeans_", "lstm"], PROGRAMS)] == ["lstm_train", "kmeans_onehot"]
    with pytest.raises(ValueError, match="no workload is called 'gpt_adamw'; known: lstm_train, "):
        select(["gpt_adamw"], PROGRAMS)


def test_unknown_workloads_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no workload is called 'tinier'; known: tiny, "):
        select(["tinier"])


def system(**changes: object) -> System:
    return replace(System("other", "a made-up system", nullcontext), **changes)


def test_wrong_results_are_not_timed() -> None:
    timing = measure.measure(WORKLOADS["tiny"], [system(wrap=lambda f: lambda x: f(x) + 1)], BRIEF, "tiny")["other"]
    assert timing.failure == "wrong results: off by 1"
    assert math.isnan(timing.seconds)


def test_failures_are_lines_and_the_rest_is_timed() -> None:
    def refuse(function: object) -> object:
        raise NotImplementedError("no tensors today\nand a second line")

    timings = measure.measure(WORKLOADS["tiny"], [system(wrap=refuse), system(name="good")], BRIEF, "tiny")
    assert timings["other"].failure == "NotImplementedError: no tensors today"
    assert timings["good"].seconds > 0
    row = table.Row("tiny", "", False, timings)
    text = table.render([row], ["eager", "other", "good"])
    assert text.endswith("\ntiny, other: NotImplementedError: no tensors today")


def test_endless_compilation_is_marked() -> None:
    counter = count()
    endless = system(compilations=lambda: next(counter))
    timing = measure.measure(WORKLOADS["tiny"], [endless], replace(BRIEF, settle_s=0.01), "tiny")["other"]
    assert not timing.settled
    assert timing.compiled_while_timed
    assert "*" in table.render([table.Row("tiny", "", False, {"other": timing})], ["eager", "other"])


def test_inference_synchronizes_at_every_step_and_training_waits_at_the_end() -> None:
    """A `sync()` in training would move what is trained out of the system's memory, in each block of a few steps."""
    calls: list[str] = []
    waiting = system(sync=lambda: calls.append("sync"), wait=lambda: calls.append("wait"))
    for name, before, timed in (
        ("tiny", ["sync"] * measure.WARM_STEPS, ["sync"] * 2),
        ("mlp_adam_loop", [], []),
    ):
        runner, _ = measure.first_results(WORKLOADS[name], waiting, "tiny")
        calls.clear()
        runner.block(2)  # the steps before the clock starts and a wait, two steps, a wait at the end
        assert calls == [*before, "wait", *timed, "wait"]


@pytest.mark.parametrize(
    ("ours", "equal"),
    [
        ([1.0, 2.0], True),
        ([1.0, 2.0001], True),
        ([1.0, 2.1], False),
        ([1.0, math.nan], False),
        ([1.0, 2.0, 3.0], False),
        ([1.0], False),
    ],
)
def test_results_are_compared_within_tolerance(ours: list[float], equal: bool) -> None:
    def tensors(values: list[float]) -> list[torch.Tensor]:
        return [torch.tensor(value) for value in values]

    assert measure.compare(WORKLOADS["tiny"], REFERENCE, tensors(ours), tensors([1.0, 2.0]))[1] is equal


def test_results_of_another_dtype_or_shape_are_wrong() -> None:
    plain = [torch.ones(2)]
    for ours in ([torch.ones(2, dtype=torch.float64)], [torch.ones(2, 1)]):
        assert measure.compare(WORKLOADS["tiny"], REFERENCE, ours, plain) == (math.inf, False)


def test_other_random_numbers_are_tolerated_only_where_a_system_draws_its_own() -> None:
    ours, plain = [torch.tensor(4.1)], [torch.tensor(4.0)]
    assert measure.compare(WORKLOADS["gpt_adamw"], SYSTEMS["compile"], ours, plain)[1]
    assert not measure.compare(WORKLOADS["gpt_adamw"], SYSTEMS["fused"], ours, plain)[1]
    assert not measure.compare(WORKLOADS["mlp_adam_loop"], SYSTEMS["compile"], ours, plain)[1]


def test_workloads_are_set_up_in_their_place_and_results_fetched_from_it() -> None:
    inside: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        inside.append(name)
        yield
        inside.remove(name)

    def wrap(function: Any) -> Any:
        assert inside == ["enter", "place"]
        return function

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        assert inside == ["enter"]
        return tensor + 1

    there = system(enter=lambda: context("enter"), place=lambda: context("place"), wrap=wrap, fetch=fetch)
    assert measure.measure(WORKLOADS["tiny"], [there], BRIEF, "tiny")["other"].failure == "wrong results: off by 1"


def test_32_bits_are_tolerated_only_where_a_system_knows_no_others() -> None:
    ours, plain = [torch.tensor([3], dtype=torch.int32)], [torch.tensor([3])]
    assert measure.compare(WORKLOADS["decode_32"], SYSTEMS["torchax"], ours, plain) == (0.0, True)
    assert measure.compare(WORKLOADS["decode_32"], SYSTEMS["fused"], ours, plain) == (math.inf, False)
    assert not measure.compare(WORKLOADS["decode_32"], SYSTEMS["torchax"], [ours[0] + 1], plain)[1]


def a_sample(base: float, first: float, steady: float, compiled: list[int | None]) -> probe.Sample:
    return probe.Sample(0.5, [2.0, 1.0], compiled, base, first, steady)


def test_probes_become_columns() -> None:
    plain = a_sample(100.0, 300.0, 200.0, [None, None])
    ours = a_sample(300.0, 600.0, 420.0, [7, 9])
    row = table.Row("gpt_adamw", "", True, {"eager": measure.Timing(0.1, 0.01, 1.0, 0.0)})
    row.timings["fused"] = measure.Timing(0.05, 0.001, 0.5, 0.02)
    row.probes = {"eager": probe.Probe(plain, plain), "fused": probe.Probe(ours, ours)}
    row.failed_probes = {"strict": "killed"}
    head, _, line, failure = table.render([row], ["eager", "fused"]).splitlines()
    cells = dict(zip((c.strip() for c in head.split("|")), (c.strip() for c in line.split("|")), strict=True))
    assert cells["eager ms"] == "100 (10.0)"
    assert cells["fused"] == "0.50 (0.02)"
    assert cells["first step fused"] == "0.50 + 2.00 / 2.00"
    assert cells["compiled fused"] == "7 + 2"
    assert (cells["memory eager"], cells["memory fused"]) == ("100 / 200", "1.20x / 1.50x")
    assert failure == "gpt_adamw, strict, in a fresh process: killed"


def test_summary_keeps_training_apart() -> None:
    def row(trains: bool, fused: float) -> table.Row:
        seconds = {"eager": 1.0, "fused": fused, "strict": 2.0}
        return table.Row("row", "", trains, {name: measure.Timing(value) for name, value in seconds.items()})

    rows = [row(True, 0.5), row(True, 2.0), row(False, 0.5)]
    assert table.summary(rows, ["eager", "fused", "strict"]).splitlines() == [
        "fused against eager: time 1.00 over 2 training workloads, 0.50 over 1 other workloads",
        "strict against eager: time 2.00 over 2 training workloads, 2.00 over 1 other workloads",
        "fused against strict: time 0.50 over 2 training workloads, 0.25 over 1 other workloads",
    ]


@pytest.mark.slow
def test_fresh_processes_tell_first_steps_and_memory() -> None:
    told = probe.probe("mlp_adam_loop", "eager", "tiny", settle_s=0.1)
    for sample in (told.cold, told.warm):
        assert len(sample.step_s) == len(sample.compilations) == probe.STEPS
        assert min(sample.step_s) > 0
        assert 0 < sample.base_mb <= sample.first_peak_mb
    assert told.cold.steady_peak_mb is None  # the first process ends after its first steps
    assert 0 < (told.warm.steady_peak_mb or 0.0) <= 1.1 * told.warm.first_peak_mb


def test_first_steps_are_those_of_fresh_processes(capsys: pytest.CaptureFixture[str]) -> None:
    first_steps.main(["--rounds=1", "--steps=3", "--size=tiny", "tiny"])
    cells = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert cells[0] == "tiny" and len(cells) == 6
    assert all(float(figure) >= 0 for figure in cells[1:])
    seconds = first_steps.run("tiny", "eager", 4, "tiny")
    assert len(seconds) == 4 and min(seconds) > 0
    for wrong in (["nothing_of_that_name"], ["tiny", "--steps=1"]):
        with pytest.raises(SystemExit):
            first_steps.main(wrong)


def test_failing_fresh_process_is_named_by_its_last_line() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        probe.probe("tiny", "nobody", "tiny")


def test_json_holds_everything_and_no_nan() -> None:
    row = table.Row("tiny", "", False, {"eager": measure.Timing(0.5), "fused": measure.Timing(failure="no")})
    told = json.loads(table.to_json([row], {"threads": 1}), parse_constant=pytest.fail)
    assert told["settings"] == {"threads": 1}
    assert told["rows"][0]["timings"]["eager"]["seconds"] == 0.5
    assert told["rows"][0]["timings"]["fused"] == {
        **dict.fromkeys(("seconds", "spread", "ratio", "ratio_spread", "compiled_while_timed", "difference")),
        "settled": True,
        "failure": "no",
    }


def run(*argv: str) -> int:
    return command.run(command.parse([*argv, "--tiny", "--quick", "--rounds=1"]))


def test_command_prints_header_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    file = f"{tmp_path}/told.json"
    assert run("tiny", "decode_32", "--modes=eager", f"--json={file}") == 0
    out = capsys.readouterr().out
    for line in ("OMP_WAIT_POLICY: ", "MALLOC_MMAP_THRESHOLD_: ", "threads: 1", "pinned to cores: ", "| decode_32 "):
        assert line in out
    with open(file) as text:
        assert [row["workload"] for row in json.load(text)["rows"]] == ["tiny", "decode_32"]


def test_command_runs_programs_without_fresh_processes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command.parse(["--programs", "big_matmul", "--modes=eager", "--tiny", "--rounds=1"])
    assert not arguments.quick  # which has none anyway
    assert command.run(arguments) == 0
    out = capsys.readouterr().out
    assert "| big_matmul " in out
    assert "| first step" not in out


@pytest.mark.parametrize(("optional", "code"), [(True, 0), (False, 1)])
def test_exit_code_tells_of_failures_that_matter(
    optional: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = system(wrap=lambda f: lambda x: f(x) + 1, optional=optional)
    monkeypatch.setitem(SYSTEMS, "other", broken)
    assert run("tiny", "--modes=other") == code
    assert "wrong results" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "rows"), [([], WORKLOADS), (["--programs"], EVERYDAY)])
def test_command_lists_workloads_and_systems(
    flags: list[str], rows: dict[str, Workload], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--list", *flags) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == {*rows, *SYSTEMS}


def test_programs_have_no_bounds_to_check() -> None:
    with pytest.raises(SystemExit):
        run("--programs", "--check")


def test_unknown_systems_are_refused() -> None:
    with pytest.raises(SystemExit, match="no system is called 'fast'; known: eager, fused"):
        run("--modes=fast")


def test_environment_names_threads_and_malloc() -> None:
    plain, raised = environment.wanted(1, "default"), environment.wanted(2, "raised")
    assert plain == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    assert raised["OMP_NUM_THREADS"] == "2"
    assert set(raised) - set(plain) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}


BOUNDS = [check.Bound("one", "fused", 1.0), check.Bound("two", "fused", 2.0)]


class Measured:
    """Stands for the processes that measure: each attempt finds the next of a row's figures."""

    def __init__(self, **figures: list[check.Found]):
        self.figures = {f"{name}/fused": iter(found) for name, found in figures.items()}
        self.asked: list[list[str]] = []

    def __call__(self, bounds: Sequence[check.Bound]) -> dict[str, check.Found]:
        self.asked.append([bound.name for bound in bounds])
        found = {name: next(self.figures[name], None) for name in self.asked[-1]}
        return {name: figure for name, figure in found.items() if figure is not None}


def test_ratios_within_their_bounds_pass_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measured(one=[1.0], two=[0.5])
    assert check.check(BOUNDS, measured) == 0
    assert measured.asked == [["one/fused", "two/fused"]]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["one/fused", "1.00,", "at", "most", "1.00"],
        ["two/fused", "0.50,", "at", "most", "2.00"],
    ]


def test_a_row_that_misses_is_measured_again_alone(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measured(one=[0.5], two=[7.0, 3.0, 1.5])
    assert check.check(BOUNDS, measured) == 0
    assert measured.asked == [["one/fused", "two/fused"], ["two/fused"], ["two/fused"]]
    assert capsys.readouterr().out.count("MISSED") == 2


def test_a_row_that_misses_each_time_fails_with_bound_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measured(one=[1.5, 1.25, 1.125, 0.1], two=[1.0])
    assert check.check(BOUNDS, measured) == 1
    assert len(measured.asked) == check.ATTEMPTS
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "FAILED one/fused: at most 1.00 of plain eager's time is allowed, measured 1.50, 1.25, 1.12"


def test_a_process_that_dies_or_never_ends_is_a_miss() -> None:
    assert check.check(BOUNDS, Measured(one=[], two=[1.0])) == 1
    late = Measured(one=[1.0], two=[])
    late.figures["two/fused"] = iter([None, None, 2.0])  # type: ignore[assignment]
    assert check.check(BOUNDS, late) == 0


def test_wrong_results_are_no_noise(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measured(one=["wrong results: off by 1", 0.5], two=[1.0])
    assert check.check(BOUNDS, measured) == 1
    assert len(measured.asked) == 1
    assert "FAILED one/fused: wrong results: off by 1" in capsys.readouterr().out


def test_no_figure_is_no_pass() -> None:
    assert check.check(BOUNDS[:1], Measured(one=[math.nan] * check.ATTEMPTS)) == 1


def test_bounds_are_on_workloads_and_systems_that_exist() -> None:
    for bound in check.BOUNDS:
        assert bound.system in SYSTEMS
        assert set(bound.less) <= set(WORKLOADS[bound.workload].full)
    assert len({bound.name for bound in check.BOUNDS}) == len(check.BOUNDS)


def test_bounds_are_chosen_by_workload() -> None:
    assert [bound.name for bound in check.select(["tiny"])] == ["tiny/fused", "tiny/recorded"]
    assert check.select([]) == list(check.BOUNDS)
    with pytest.raises(SystemExit, match="no bound is set for 'tinier'; there are bounds for: tiny, elementwise_1m"):
        run("tinier", "--check")


def test_rows_are_measured_in_a_process_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check.in_fresh_process([check.Bound("nobody", "fused", 1.0)]) == {}
    monkeypatch.setattr(check, "LIMIT_S", 0.01)
    assert check.in_fresh_process(check.BOUNDS) == {}
    assert "not done after 0 s" in capfd.readouterr().out


def test_a_measured_row_tells_its_ratio_or_its_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = check.Bound("tiny", "other", 1.0, {"ops": 6})
    monkeypatch.setattr(check, "BOUNDS", (bound,))
    for wrap, kind in ((lambda f: f, float), (lambda f: lambda x: f(x) + 1, str)):
        monkeypatch.setitem(SYSTEMS, "other", system(wrap=wrap))
        check.main([bound.name])
        name, found = json.loads(capsys.readouterr().out)
        assert (name, type(found)) == ("tiny/other", kind)


def test_the_cost_of_checks_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(index_checks, "SECONDS", 0.0001)
    monkeypatch.setattr(index_checks, "ROUNDS", 1)
    monkeypatch.setattr(index_checks, "_programs", lambda: {"an index": lambda: torch.ones(4)[torch.tensor([1])]})
    index_checks.main()
    assert re.search(r"\| an index \| \d+\.\d\d \| \d+\.\d\d \|", capsys.readouterr().out)


@pytest.mark.parametrize("way", entering.WAYS)
def test_steps_are_counted_wherever_contexts_are_entered(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(entering.WAYS, way, replace(entering.WAYS[way], turn_s=1e-3))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    entering.work("tiny", way, "tiny")
    turns = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(turns) == 2 and all(int(steps) > 0 and float(took) >= 1e-3 for steps, took in turns)


@pytest.mark.slow
def test_a_first_minute_is_told_for_two_processes_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "minute.json"
    assert first_minute.main(["tiny", "--size", "tiny", "--seconds", "1", "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"\| tiny( \| \d+\.\d\d){6} \|", told)
    kept = json.loads(file.read_text())["programs"]["tiny"]
    assert len(kept) == 2 and all(turn["seconds"] >= TURN_S for turns in kept for turn in turns)


def test_the_work_of_a_part_of_a_minute_is_that_of_its_turns() -> None:
    turns = [first_minute.Turn(10.0, 5.0, 1.0), first_minute.Turn(10.0, 20.0, 1.0), first_minute.Turn(20.0, 20.0, 2.0)]
    found = first_minute.Minute(tuple(turns))
    assert found.seconds == 4.0
    assert found.work(end=1.0) == 0.5
    assert found.work(begin=2.0) == 1.0
    assert found.work() == pytest.approx((5 + 20 + 40) / (10 + 10 + 40))
    assert first_minute.Minute(()).work() != first_minute.Minute(()).work()


def test_the_programs_of_the_first_minute_exist() -> None:
    assert set(first_minute.DEFAULT) <= set(first_minute.EVERY)


@pytest.mark.slow
def test_a_clients_steps_are_told_in_a_context_and_on_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "clients.json"
    assert clients.main(["nano_gpt", "--turns", "2", "--device-turns", "2", "--json", str(file)]) == 0
    assert re.search(r"\| nano_gpt( \| \d+ ms \| \d+\.\d\d){2} \| \d+ \| \d+ \|", capsys.readouterr().out)
    kept = json.loads(file.read_text())["nano_gpt"]
    assert [len(kept[door]["turns"]) for door in ("context", "device")] == [2, 2]


def test_a_client_that_ends_before_its_turns_are_over_is_told_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSED_EAGER_PLATFORM", "nowhere")
    assert clients.main(["nano_gpt", "--turns", "1", "--device-turns", "1"]) == 1
    assert "the program has ended; see /dev/null" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        clients.main(["nanogpt"])


def test_a_pairs_ratio_is_that_of_its_last_turns() -> None:
    early, late = first_minute.Turn(10.0, 1.0, 1.0), first_minute.Turn(10.0, 20.0, 1.0)
    assert clients.Pair([early] * 60 + [late] * clients.LAST, (0, 0)).ratio == 2.0
    assert all(callable(getattr(client_programs, name)) for name in clients.PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ranks_over_plain.KINDS)
def test_steps_of_several_ranks_are_timed_in_each_way(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"layers": 1, "dim": 16, "seq": 8, "batch": 2, "steps": 2, "rounds": 2, "settle": 1}
    options = [word for name, number in small.items() for word in (f"--{name}", str(number))]
    ranks_over_plain.main(["--ranks", "2", "--kinds", kind, *options])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:3] for line in lines] == [[kind, "2", way] for way in ranks_over_plain.WAYS]
    device = lines[-1]
    assert float(device[6]) >= 2 and float(device[7]) >= 2, "regions, and collectives"

"""Measures: `python -m benchmarks`, one JSON line a case into benchmarks/results.

A case is a row, a direction and an implementation. Cases that the output file has already, measured with these sources
on this device, are left out, so a run that was cut short goes on where it stopped.
"""

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import floors, oracle
from benchmarks.implementations import DIRECTIONS, IMPLEMENTATIONS, Implementation, versions
from benchmarks.inputs import Inputs, Pool, make_inputs, make_pool, num_sets
from benchmarks.jax_case import JaxCase
from benchmarks.lines import RESULTS, read_lines, source_hash
from benchmarks.rows import PRESETS, Row, select
from benchmarks.timing import Settings, measure
from benchmarks.torch_case import TorchCase

CHECKS = ("all", "heads", "none")
COMMAND = (sys.executable, "-m", "benchmarks", "--warm")
# Programs compiled ahead of the row that is measured.
COMPILED_AHEAD = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """What one line is about."""

    row: Row
    direction: str
    implementation: Implementation

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.row.name, self.direction, self.implementation.name)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the operator and its peers.")
    parser.add_argument("rows", nargs="*", help="row names with wildcards, or rows as HxHV/lengths such as 2x4/65+130")
    parser.add_argument("--preset", choices=PRESETS, help="rows of a table (default, without rows: issue)")
    parser.add_argument("--heads", action="append", default=[], help="only rows with these head counts, wildcards too")
    parser.add_argument("--direction", action="append", choices=DIRECTIONS, help="default: forward; repeatable")
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="default: all installed")
    parser.add_argument("--check", choices=CHECKS, default="heads", help="compare with the oracle: all rows, the first"
                        " of each head counts (default), or none")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=9, help="measured repeats of a case (default 9)")
    parser.add_argument("--target-ms", type=float, default=25.0, help="least time of a repeat (default 25)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no new row is started")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "latest.jsonl", help="file of lines (default: latest.jsonl)"
    )
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    options.direction = options.direction or ["forward"]
    if not options.preset and not options.rows:
        options.preset = "issue"
    return options


def chosen_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every case that was asked for and can run here; says which implementation cannot."""
    implementations = []
    for name in options.implementation or IMPLEMENTATIONS:
        implementation = IMPLEMENTATIONS[name]
        if reason := implementation.absent():
            print(f"{name}: left out, {reason}", file=sys.stderr)
        else:
            implementations.append(implementation)
    for row in select(options.preset, options.rows, options.heads):
        for direction in options.direction:
            for implementation in implementations:
                if direction in implementation.directions:
                    yield Case(row, direction, implementation)


def warm_up(cases: Iterable[Case]) -> None:
    """Lets peers that compile for long at their first call do so, each head count in a process of its own."""
    first: dict[tuple[str, str], Case] = {}
    for case in cases:
        if case.implementation.compiles_on_call:
            first.setdefault((case.implementation.name, f"{case.row.heads_name} {case.direction}"), case)
    processes = [
        subprocess.Popen(
            [*COMMAND, case.row.name, "--direction", case.direction, "--implementation", case.implementation.name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for case in first.values()
    ]
    for process in tqdm(processes, desc="compiling peers", disable=not processes):
        process.wait()


def build(case: Case) -> JaxCase | TorchCase:
    """Makes the case; one of JAX compiles here, and needs no data for it."""
    implementation = case.implementation
    kind = JaxCase if implementation.framework == "jax" else TorchCase
    operator = implementation.load()
    return kind(case.row, case.direction, operator, implementation.arrange, implementation.calls(case.row))


def run_case(
    case: Case, built: JaxCase | TorchCase, sets: list[Inputs], want: Any, settings: Settings
) -> dict[str, Any]:
    """Checks and times one case."""
    built.bind(sets)
    try:
        line: dict[str, Any] = {}
        if want is not None:
            results = case.implementation.restore(case.row, built.results())
            line["errors"] = oracle.errors(results, want(case.implementation.one_state(case.row)))
        timing = measure(built.replay, built.calls, settings)
        line["timing"] = dataclasses.asdict(timing)
        line["latency"] = dataclasses.asdict(built.latency())
        line["us_per_unit"] = timing.median_ms * 1e3 * floors.H200.num_sms / case.row.units
        line["floor_ms"] = floors.floor_ms(case.row, case.direction)
        line["replayed_as"] = getattr(built, "replayed_as", "program")
        return line
    finally:
        built.release()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    options = parse(arguments)
    start = time.perf_counter()
    cases = list(chosen_cases(options))
    if not cases:
        print("nothing to measure", file=sys.stderr)
        return 1
    if options.warm:
        case = cases[0]
        pool = make_pool([case.row], gradients=case.direction != "forward")
        build(case).bind([make_inputs(pool, case.row, 0)])
        return 0
    facts = {"device": jax.devices()[0].device_kind, "sources": source_hash()}
    done = {
        (line["row"], line["direction"], line["implementation"])
        for line in read_lines(options.out)
        if all(line[name] == value for name, value in facts.items()) and "error" not in line
    }
    cases = [case for case in cases if case.key not in done]
    warm_up(cases)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = Settings(repeats=options.repeats, target_ms=options.target_ms)
    with options.out.open("a") as file:
        for case, line in measured(cases, options, settings, start):
            line = {
                "row": case.row.name,
                "direction": case.direction,
                "implementation": case.implementation.name,
                **facts,
                "date": datetime.date.today().isoformat(),
                "versions": versions(case.implementation.distributions),
                "dims": case.row.dims,
                "lengths": case.row.lengths,
                **case.implementation.details(case.row),
                **line,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


def measured(
    cases: list[Case], options: argparse.Namespace, settings: Settings, start: float
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Runs the cases, those of a row on the same inputs and one after the other; a failure becomes a line."""
    groups: dict[tuple[Row, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.row, case.direction), []).append(case)
    if not groups:
        return
    pool = make_pool([row for row, _ in groups], gradients=any(direction != "forward" for _, direction in groups))
    seen: set[tuple[str, str]] = set()
    with ThreadPoolExecutor(COMPILED_AHEAD) as executor, tqdm(total=len(groups), unit="row") as bar:
        queue = list(groups.items())
        futures: dict[Case, Future] = {}

        def compile_ahead(position: int) -> None:
            for _, members in queue[position : position + COMPILED_AHEAD]:
                for case in members:
                    if case.implementation.framework == "jax" and case not in futures:
                        futures[case] = executor.submit(build, case)

        for position, ((row, direction), members) in enumerate(queue):
            if time.perf_counter() - start > options.budget:
                bar.write(f"out of time: {len(queue) - position} rows not measured")
                break
            compile_ahead(position)
            bar.set_postfix_str(row.name)
            kind = (row.heads_name, direction)
            checked = options.check == "all" or (options.check == "heads" and kind not in seen)
            seen.add(kind)
            sets = sets_of(pool, row, direction)
            want = expectations(row, sets[0], direction) if checked else None
            for case in members:
                try:
                    built = futures.pop(case).result() if case in futures else build(case)
                    line = run_case(case, built, sets, want, settings)
                    bar.write(f"{row.name:>18} {direction} {case.implementation.name:>10} "
                              f"{line['timing']['median_ms']:.4f} ms {line.get('errors', '')}")  # fmt: skip
                except Exception as error:
                    where = [f"{x.filename}:{x.lineno}" for x in traceback.extract_tb(error.__traceback__)[-4:]]
                    line = {"error": f"{type(error).__name__}: {str(error)[:500]}", "where": where}
                    bar.write(f"{row.name:>18} {direction} {case.implementation.name:>10} {line['error'][:150]}")
                yield case, line
            bar.update()


def sets_of(pool: Pool, row: Row, direction: str) -> list[Inputs]:
    """The sets that a row rotates over."""
    sets = [make_inputs(pool, row, index) for index in range(num_sets(row))]
    if direction == "forward":
        sets = [inputs._replace(do=None, dfinal_state=None) for inputs in sets]
    return jax.block_until_ready(sets)


def expectations(row: Row, inputs: Inputs, direction: str) -> Any:
    """A function of `one_state` that computes the truth once for each kind of implementation."""
    known: dict[bool, dict[str, Any]] = {}

    def want(one_state: bool) -> dict[str, Any]:
        if one_state not in known:
            known[one_state] = oracle.expected(row, inputs, direction, one_state=one_state)
        return known[one_state]

    return want


if __name__ == "__main__":
    sys.exit(main())

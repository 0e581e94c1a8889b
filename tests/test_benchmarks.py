"""The benchmark runs, goes on where it stopped, and is reported: on the CPU, with the plain path and tiny rows."""

import dataclasses
import json
import shutil

import pytest

from benchmarks import __main__ as runner
from benchmarks import floors, report, rows, timing
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.lines import ROOT, read_lines
from jaxqla.__main__ import support_matrix
from kernels.table import KERNELS

ROW = "1x2/65+66"
ARGUMENTS = [ROW, "--implementation", "xla", "--repeats", "7", "--target-ms", "1", "--check", "all"]


def test_a_run_checks_times_and_resumes(tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    assert runner.main([*ARGUMENTS, "--out", str(out)]) == 0
    (line,) = read_lines(out)
    assert line["row"] == ROW
    assert 0 < line["errors"]["o"] < 1e-2
    assert line["timing"]["repeats"] == 7
    assert line["timing"]["p20_ms"] <= line["timing"]["median_ms"] <= line["timing"]["p80_ms"]
    assert runner.main([*ARGUMENTS, "--out", str(out)]) == 0
    assert len(read_lines(out)) == 1
    assert runner.main([*ARGUMENTS, "1x1/1x64", "--budget", "0", "--out", str(out)]) == 0
    assert len(read_lines(out)) == 1


def test_a_failure_is_a_line_and_the_run_goes_on(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("no such thing")

    broken = dataclasses.replace(runner.IMPLEMENTATIONS["xla"], operator=fail)
    monkeypatch.setitem(runner.IMPLEMENTATIONS, "xla", broken)
    out = tmp_path / "lines.jsonl"
    assert runner.main([*ARGUMENTS, "--out", str(out)]) == 0
    assert "no such thing" in read_lines(out)[0]["error"]


def test_what_is_not_installed_is_left_out_and_named(tmp_path, capsys):
    assert runner.main([ROW, "--implementation", "flashqla", "--out", str(tmp_path / "lines.jsonl")]) == 1
    assert "flashqla: left out" in capsys.readouterr().err


def test_rows():
    assert len(rows.FORWARD_ROWS) == 9 * 19
    assert len(rows.BACKWARD_ROWS) == 4 * 8
    assert rows.parse_row(ROW).units == 2 * (2 + 2)
    assert [row.name for row in rows.select(None, ["tp1/4096x*"])] == ["tp1/4096x2", "tp1/4096x8"]
    with pytest.raises(ValueError, match="2x3/64"):
        rows.parse_row("2x3/64")


def test_the_floor_of_a_known_row():
    # 32768 chunks and heads, r = 4: 8.39 + 2.10 / 4 MFLOP each at 790 TFLOP/s.
    row = rows.ROWS["tp1/4096x8"]
    assert floors.forward_work(row).flop_ms() == pytest.approx(32768 * (8.389 + 0.524) / 790e6 * 1e3, rel=1e-3)


def test_too_few_repeats_are_refused():
    with pytest.raises(ValueError, match="at least 7, got 3"):
        timing.Settings(repeats=3)


def test_the_report_compares_within_a_file(tmp_path):
    def line(implementation, ms):
        return json.dumps(
            {
                "row": "tp1/4096x8",
                "direction": "forward",
                "implementation": implementation,
                "timing": {"median_ms": ms},
                "us_per_unit": 1.0,
                "floor_ms": 0.1,
                "errors": {"o": 4e-3},
            }
        )

    results = tmp_path / "results"
    results.mkdir()
    (results / "a.jsonl").write_text(f"{line('cuda', 1.0)}\n{line('flashinfer', 2.0)}\n")
    (results / "b.jsonl").write_text(f"{line('cuda', 0.5)}\n{line('flashqla', 1.5)}\n")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "performance.md", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    assert report.main(["--results", str(results), "--root", str(tmp_path)]) == 0
    readme = (tmp_path / "README.md").read_text()
    assert "FlashInfer: 2.00x" in readme
    assert "FlashQLA: 3.00x" in readme
    assert "| tp1/4096x8 | o | 4.000e-03 |" in (tmp_path / "docs" / "performance.md").read_text()
    assert {path.name for path in (tmp_path / "docs" / "plots").iterdir()} == {"latency.svg", "ratio.svg", "floor.svg"}


def test_the_readme_shows_the_support_matrix_of_the_kernel_table():
    assert support_matrix([dataclasses.asdict(kernel) for kernel in KERNELS]) in (ROOT / "README.md").read_text()


def test_lines_say_which_kernels_ours_would_run():
    details = IMPLEMENTATIONS["cuda"].details(rows.ROWS["hk4_hv8/8k_2seq"])
    assert set(details) == {"kernels", "backward_kernels"}

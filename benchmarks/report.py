"""Makes tables and plots of what was measured: `python -m benchmarks.report`.

Reads every file of benchmarks/results, writes tables between the markers of docs/performance.md and README.md, and
plots into docs/plots. Implementations are compared within one file only, that is, within one run on one device. The
support matrix of README.md is made here too, from the table of kernels.
"""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.lines import RESULTS, ROOT, read_lines
from benchmarks.rows import ISSUE_ROWS, ROWS
from jaxqla.__main__ import support_matrix
from kernels.table import KERNELS

OURS = "cuda"
PEERS = tuple(name for name in IMPLEMENTATIONS if name not in (OURS, "xla"))
PLOTS = Path("docs", "plots")


@dataclass
class Entry:
    """One row and direction, over all files."""

    row: str
    direction: str
    ours_ms: float = math.nan
    floor_ms: float = math.nan
    us_per_unit: float = math.nan
    peers: dict[str, tuple[float, float]] = field(default_factory=dict)  # milliseconds, and ours in the same file
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest peer and its time over ours, both of one file."""
        ratios = {name: theirs / ours for name, (theirs, ours) in self.peers.items()}
        return min(ratios.items(), key=lambda item: item[1]) if ratios else None

    @property
    def items(self) -> int:
        """Independent walks of the row."""
        return ROWS[self.row].items


def collect(files: Iterable[Path]) -> list[Entry]:
    """Entries in the order of the benchmark's table; later lines and files replace earlier ones."""
    entries: dict[tuple[str, str], Entry] = {}
    for path in files:
        lines = [line for line in read_lines(path) if "implementation" in line and "timing" in line]
        ours = {(x["row"], x["direction"]): x["timing"]["median_ms"] for x in lines if x["implementation"] == OURS}
        for line in lines:
            key = (line["row"], line["direction"])
            if key[0] not in ROWS:
                continue
            entry = entries.setdefault(key, Entry(*key))
            if line.get("errors"):
                entry.errors[line["implementation"]] = line["errors"]
            if line["implementation"] == OURS:
                entry.ours_ms, entry.us_per_unit = line["timing"]["median_ms"], line["us_per_unit"]
                entry.floor_ms = line["floor_ms"]
            elif line["implementation"] in PEERS and key in ours:
                entry.peers[line["implementation"]] = (line["timing"]["median_ms"], ours[key])
    order = {name: position for position, name in enumerate(ROWS)}
    return sorted(entries.values(), key=lambda entry: (order[entry.row], entry.direction))


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)])


def number(x: float, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if math.isnan(x) else f"{x:.{digits}f}"


def speed_table(entries: Sequence[Entry]) -> str:
    """Milliseconds of every implementation, the best peer over ours, and ours over the floor."""
    peers = [name for name in PEERS if any(name in entry.peers for entry in entries)]
    head = ["row", "N x HV", "jaxqla ms", *(f"{IMPLEMENTATIONS[name].title} ms" for name in peers)]
    head += ["best peer / jaxqla", "us/unit/SM", "jaxqla / floor"]

    def cells(entry: Entry) -> list[str]:
        best = entry.best
        theirs = [number(entry.peers.get(name, (math.nan, 0))[0]) for name in peers]
        ratio = "-" if best is None else f"{best[1]:.2f}"
        floor = entry.ours_ms / entry.floor_ms
        return [entry.row, str(entry.items), number(entry.ours_ms), *theirs, ratio, number(entry.us_per_unit, 2),
                number(floor, 1)]  # fmt: skip

    return table(head, map(cells, entries))


def summary(entries: Sequence[Entry]) -> str:
    """One line for each peer: on how many rows it was timed beside ours, and the geometric mean of the ratios."""
    lines = []
    for name in PEERS:
        ratios = [entry.peers[name][0] / entry.peers[name][1] for entry in entries if name in entry.peers]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(
                f"- {IMPLEMENTATIONS[name].title}: {mean:.2f}x its speed in the geometric mean of {len(ratios)} rows"
                f" (least {min(ratios):.2f}x, most {max(ratios):.2f}x); {sum(x >= 1 for x in ratios)} rows no slower"
            )
    return "\n".join(lines)


def accuracy_table(entries: Sequence[Entry]) -> str:
    """Relative RMS errors against float64, of all implementations that were checked on a row."""
    names = [name for name in IMPLEMENTATIONS if any(name in entry.errors for entry in entries)]
    head = ["row", "result", *(IMPLEMENTATIONS[name].title for name in names)]
    body = []
    for entry in entries:
        for result in dict.fromkeys(result for errors in entry.errors.values() for result in errors):
            values = [entry.errors.get(name, {}).get(result, math.nan) for name in names]
            body.append([entry.row, result, *("-" if math.isnan(x) else f"{x:.3e}" for x in values)])
    return table(head, body)


def kernel_table(lines: Sequence[dict[str, Any]]) -> str:
    """The kernels one by one."""
    latest = {(line["row"], line["kernel"]): line for line in lines}
    head = ["row", "kernel", "ms", "p20-p80", "us/unit/SM", "floor ms", "TFLOP/s", "GB/s", "registers", "shared KB"]
    body = []
    for line in latest.values():
        timing = line["timing"]
        body.append(
            [
                line["row"],
                f"`{line['kernel']}`",
                number(timing["median_ms"], 4),
                f"{timing['p20_ms']:.4f}-{timing['p80_ms']:.4f}",
                number(line["us_per_unit"], 2),
                number(line["floor_ms"], 4),
                number(line["tflops"], 0),
                number(line["gb_per_s"], 0),
                str(line["registers"]),
                number(line["shared_bytes"] / 1024, 0),
            ]
        )
    return table(head, body)


def support() -> str:
    """Which dtypes and widths run on what."""
    return support_matrix([dataclasses.asdict(kernel) for kernel in KERNELS])


def fill(path: Path, sections: dict[str, str]) -> None:
    """Replaces what stands between `<!-- name:begin -->` and `<!-- name:end -->`; a missing marker is an error."""
    text = path.read_text()
    for name, content in sections.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        if not re.search(pattern, text, re.DOTALL):
            raise ValueError(f"report: {path} must have the markers of {name}")
        text = re.sub(pattern, lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)
    path.write_text(text)


def plot(entries: Sequence[Entry], folder: Path) -> None:
    """Latency by row, ratio to the best peer, and distance from the floor, one figure each."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "jaxqla"  # the same picture, the same file
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    entries = [entry for entry in entries if not math.isnan(entry.ours_ms)]
    places = range(len(entries))

    def figure(name: str, title: str, label: str, draw: Any, line: float | None = None) -> None:
        shape, axes = plt.subplots(figsize=(max(6, 0.16 * len(entries)), 4.5), layout="constrained")
        draw(axes)
        if line is not None:
            axes.axhline(line, color="black", linewidth=0.8)
        axes.set_xticks(places, [entry.row for entry in entries], rotation=90, fontsize=5)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.set_title(title)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        shape.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(shape)

    def latency(axes: Any) -> None:
        axes.plot(places, [entry.ours_ms for entry in entries], "o", markersize=3, label="jaxqla")
        for name in PEERS:
            times = [entry.peers.get(name, (math.nan, 0))[0] for entry in entries]
            if not all(map(math.isnan, times)):
                axes.plot(places, times, "x", markersize=3, label=IMPLEMENTATIONS[name].title)
        axes.plot(places, [entry.floor_ms for entry in entries], "_", color="grey", label="floor")

    best = [entry.best[1] if entry.best else math.nan for entry in entries]
    figure("latency", "Forward", "ms", latency)
    figure("ratio", "Best peer over jaxqla (above the line: jaxqla is faster)", "ratio",
           lambda axes: axes.bar(places, [x - 1 for x in best], bottom=1), 1)  # fmt: skip
    figure("floor", "jaxqla over the floor", "ratio",
           lambda axes: axes.plot(places, [entry.ours_ms / entry.floor_ms for entry in entries], "o", markersize=3),
           1)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Tables and plots of the results.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--root", type=Path, default=ROOT, help="where docs/ and README.md are")
    options = parser.parse_args(arguments)
    files = sorted(options.results.glob("*.jsonl"))
    entries = [entry for entry in collect(files) if entry.direction == "forward"]
    kernels = [line for path in files for line in read_lines(path) if "kernel" in line]
    if not entries:
        print(f"report: {options.results} must hold forward lines, got {len(files)} files", file=sys.stderr)
        return 1
    checked = [entry for entry in entries if entry.errors]
    chosen = [entry for entry in entries if entry.row in ISSUE_ROWS]
    plots = "\n".join(f"![{name}](plots/{name}.svg)" for name in ("latency", "ratio", "floor"))
    fill(
        options.root / "docs" / "performance.md",
        {
            "kernels": kernel_table(kernels) if kernels else "Not measured yet.",
            "forward": f"{summary(entries)}\n\n{plots}\n\n{speed_table(entries)}",
            "accuracy": accuracy_table(checked) if checked else "Not measured yet.",
        },
    )
    numbers = f"Forward on one H200, bf16.\n\n{summary(entries)}\n\n{speed_table(chosen)}"
    fill(options.root / "README.md", {"numbers": numbers, "support": support()})
    plot(entries, options.root / PLOTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

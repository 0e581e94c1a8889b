"""The rows that are measured: head counts of the Qwen3.5 family under tensor parallelism, times lists of lengths.

The table follows FlashQLA's published benchmark: 9 x 19 rows forward, 4 x 8 backward, all packed with `cu_seqlens`,
K = V = 128.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

CHUNK = 64
HEAD_DIM = 128


@dataclass(frozen=True)
class Row:
    """One shape of the benchmark.

    Attributes:
        name: `heads/lengths`, unique over both tables.
        H: Query and key heads.
        HV: Value heads.
        lengths: Tokens of each packed sequence.
    """

    name: str
    H: int
    HV: int
    lengths: tuple[int, ...]
    K: int = HEAD_DIM
    V: int = HEAD_DIM

    @property
    def heads_name(self) -> str:
        return self.name.split("/")[0]

    @property
    def lengths_name(self) -> str:
        return self.name.split("/")[1]

    @property
    def N(self) -> int:
        return len(self.lengths)

    @property
    def T(self) -> int:
        return sum(self.lengths)

    @property
    def items(self) -> int:
        """Sequences times value heads: the independent walks of a forward pass."""
        return self.N * self.HV

    @property
    def num_chunks(self) -> int:
        return sum(-(-length // CHUNK) for length in self.lengths)

    @property
    def units(self) -> int:
        """The unit of account: one chunk of one value head."""
        return self.num_chunks * self.HV

    @property
    def dims(self) -> dict[str, int]:
        return {"N": self.N, "T": self.T, "H": self.H, "HV": self.HV, "K": self.K, "V": self.V}


def lengths_label(lengths: Sequence[int]) -> str:
    """`1x32768` for one sequence, `4096x8` for eight of 4096 tokens, `1024+7168` for unequal ones."""
    if len(lengths) == 1:
        return f"1x{lengths[0]}"
    if len(set(lengths)) == 1:
        return f"{lengths[0]}x{len(lengths)}"
    return "+".join(map(str, lengths))


def parse_row(text: str) -> Row:
    """Reads a row that is in no table, as `HxHV/lengths`: `2x4/65+130`, `1x2/1x100`, `2x2/64x3`."""
    match = re.fullmatch(r"(\d+)x(\d+)/(?:(\d+)x(\d+)|(\d+(?:\+\d+)*))", text)
    if not match:
        raise ValueError(f"row must be HxHV/lengths such as 2x4/65+130, got {text!r}")
    H, HV = int(match[1]), int(match[2])
    if match[5]:
        lengths = tuple(map(int, match[5].split("+")))
    else:
        first, second = int(match[3]), int(match[4])
        lengths = (second,) if first == 1 else (first,) * second
    if H < 1 or HV % H or not sum(lengths):
        raise ValueError(f"row must have HV a multiple of H and at least one token, got {text!r}")
    return Row(f"{H}x{HV}/{lengths_label(lengths)}", H, HV, lengths)


FORWARD_HEADS = {
    "tp8": (2, 8),
    "tp4": (4, 16),
    "tp2": (8, 32),
    "tp1": (16, 64),
    "35b": (16, 32),
    "27b_tp2": (8, 24),
    "27b": (16, 48),
    "2b": (16, 16),
    "sym": (32, 32),
}
HEADS_TITLES = {
    "tp8": "Qwen3.5 397B and 122B, TP 8",
    "tp4": "Qwen3.5 397B and 122B, TP 4",
    "tp2": "Qwen3.5 397B and 122B, TP 2",
    "tp1": "Qwen3.5 397B and 122B, TP 1",
    "35b": "Qwen3.5 35B, 9B and 4B, TP 1",
    "27b_tp2": "Qwen3.5 27B, TP 2",
    "27b": "Qwen3.5 27B, TP 1",
    "2b": "Qwen3.5 2B and 0.8B, TP 1",
    "sym": "32 heads of each kind",
}
FORWARD_LENGTHS = (
    *((length,) for length in (32768, 16384, 8192, 4096, 2048)),
    *((length, 32768 - length) for length in (28672, 24576, 16384, 8192, 4096)),
    (12288, 4096),
    *((length, 8192 - length) for length in (6144, 4096, 2048, 1024)),
    (8192,) * 4,
    (4096,) * 8,
    (2048,) * 4,
    (1024,) * 8,
)
BACKWARD_HEADS = {"hk16_hv32": (16, 32), "hk8_hv16": (8, 16), "hk4_hv8": (4, 8), "hk2_hv4": (2, 4)}
BACKWARD_LENGTHS = {
    "8k_1seq": (8192,),
    "8k_2seq": (7053, 1139),
    "8k_4seq": (5809, 1244, 406, 733),
    "8k_8seq": (161, 1928, 3157, 563, 1244, 229, 177, 733),
    "32k_1seq": (32768,),
    "32k_2seq": (7212, 25556),
    "32k_4seq": (7212, 7072, 13725, 4759),
    "32k_8seq": (3274, 1029, 2909, 5061, 2011, 3793, 9932, 4759),
}

FORWARD_ROWS = tuple(
    Row(f"{name}/{lengths_label(lengths)}", *heads, lengths)
    for name, heads in FORWARD_HEADS.items()
    for lengths in FORWARD_LENGTHS
)
BACKWARD_ROWS = tuple(
    Row(f"{name}/{label}", *heads, lengths)
    for name, heads in BACKWARD_HEADS.items()
    for label, lengths in BACKWARD_LENGTHS.items()
)
ROWS = {row.name: row for row in (*FORWARD_ROWS, *BACKWARD_ROWS)}

# The order of importance: the rows that goals are set on, then one or two of each regime.
ISSUE_ROWS = (
    "27b/1x16384",
    "tp1/1x32768",
    "tp1/4096x8",
    "tp8/1x32768",
    "35b/1x32768",
    "tp2/1x16384",
    "sym/8192x4",
    "tp1/1024+7168",
    "tp1/1x2048",
    "tp4/1x8192",
    "tp8/1x4096",
)

PRESETS = {
    "issue": tuple(ROWS[name] for name in ISSUE_ROWS),
    # Enough sequences and heads to occupy the chip without splitting a sequence, the longest work first.
    "wide": tuple(sorted((row for row in FORWARD_ROWS if row.items >= 60), key=lambda row: -row.units)),
    "forward": FORWARD_ROWS,
    "backward": BACKWARD_ROWS,
}


def select(preset: str | None, patterns: Iterable[str] = (), heads: Iterable[str] = ()) -> list[Row]:
    """Rows of a preset, or those that any pattern names, kept where `heads` (patterns too) allows; in the order asked
    for.

    A pattern is a row's name with shell wildcards, or a row of its own in the form that `parse_row` reads.
    """
    rows = list(PRESETS[preset]) if preset else []
    for pattern in patterns:
        known = [row for row in ROWS.values() if fnmatchcase(row.name, pattern)]
        rows += known or [parse_row(pattern)]
    heads = list(heads)
    unique = dict.fromkeys(rows)
    return [row for row in unique if not heads or any(fnmatchcase(row.heads_name, pattern) for pattern in heads)]

"""What the hardware allows: the least time of a row, from the operations it must do and the bytes it must move.

One unit is one chunk of 64 tokens of one value head with K = V = 128; `r = HV / H` value heads share a query and key
head.
"""

from dataclasses import dataclass

from benchmarks.rows import CHUNK, Row


@dataclass(frozen=True)
class Ceilings:
    """Rates that were reached on the device by a large matrix product and a large copy."""

    flops_per_s: float
    bytes_per_s: float
    num_sms: int


H200 = Ceilings(flops_per_s=790e12, bytes_per_s=4.3e12, num_sms=132)


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one pass."""

    flops: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def flop_ms(self, ceilings: Ceilings = H200) -> float:
        return self.flops / ceilings.flops_per_s * 1e3

    def byte_ms(self, ceilings: Ceilings = H200) -> float:
        return self.bytes / ceilings.bytes_per_s * 1e3

    def floor_ms(self, ceilings: Ceilings = H200) -> float:
        return max(self.flop_ms(ceilings), self.byte_ms(ceilings))


def forward_work(row: Row) -> Work:
    """Five products of a chunk per value head, two per key head; inputs, outputs and states moved once."""
    wide, narrow = 2 * CHUNK * row.K * row.V, 2 * CHUNK * CHUNK * row.V
    scores = 2 * CHUNK * CHUNK * row.K
    keys = row.num_chunks * row.H
    flops = row.units * (3 * wide + 2 * narrow) + keys * 2 * scores
    values = 2 * 2 * CHUNK * row.V + 2 * 4 * CHUNK
    states = row.items * 2 * 4 * row.K * row.V
    return Work(flops, row.units * values + keys * 2 * 2 * CHUNK * row.K + states)


def backward_work(row: Row) -> Work:
    """The fused form that reads the chunk states once from memory: 8 + 8 products per value head, two per key head."""
    wide, narrow = 2 * CHUNK * row.K * row.V, 2 * CHUNK * CHUNK * row.V
    keys = row.num_chunks * row.H
    flops = row.units * (8 * wide + 8 * narrow) + keys * 2 * 2 * CHUNK * CHUNK * row.K
    values = (
        3 * 2 * CHUNK * row.V + 2 * CHUNK * CHUNK + 2 * 2 * row.K * row.V
    )  # v, do, dv; the inverse; states both ways
    return Work(flops, row.units * values + keys * 4 * 2 * CHUNK * row.K)


def work(row: Row, direction: str) -> Work:
    if direction == "forward":
        return forward_work(row)
    if direction == "backward":
        return backward_work(row)
    return forward_work(row) + backward_work(row)


def floor_ms(row: Row, direction: str, ceilings: Ceilings = H200) -> float:
    """Least milliseconds of one direction; a forward and a backward pass cannot share their bounds."""
    if direction == "forward_backward":
        return forward_work(row).floor_ms(ceilings) + backward_work(row).floor_ms(ceilings)
    return work(row, direction).floor_ms(ceilings)

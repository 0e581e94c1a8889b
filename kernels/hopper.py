"""What the kernels assume of the chip: one record, so that a second architecture is a second record."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Limits and choices of one GPU generation.

    Attributes:
        target: TileLang target.
        shared_bytes: Shared memory a block may ask for.
        state_registers: Registers of a thread that holds the recurrent state; below 208 ptxas serialises its WGMMA.
        helper_registers: Registers of a thread of the score warpgroup, by the number of state warpgroups beside it.
        producer_registers: Registers of a thread that moves data, likewise.
        gradient_registers: Registers of a thread of the two warpgroups that make gradients.
        gradient_producer_registers: Registers of a thread that moves data beside these.
    """

    target: dict[str, str]
    shared_bytes: int
    state_registers: int
    helper_registers: dict[int, int]
    producer_registers: dict[int, int]
    gradient_registers: int
    gradient_producer_registers: int


HOPPER = Architecture(
    target={"kind": "cuda", "arch": "sm_90a"},
    shared_bytes=227 * 1024,
    state_registers=208,
    helper_registers={1: 136, 2: 72},
    producer_registers={1: 56, 2: 24},
    gradient_registers=224,
    gradient_producer_registers=56,
)

"""One row and direction of a JAX implementation, compiled so that one program makes several calls.

The calls of a program run over different sets, and each takes its state from the call before: the initial state is the
last final state, the cotangent of the final state is the last gradient of the initial one. So the compiler can neither
merge nor reorder nor overlap them, and no kernel is added. The results of all calls are returned, into buffers that the
previous run donates.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.inputs import Inputs, abstract_inputs
from benchmarks.oracle import GRADIENTS, compared_heads
from benchmarks.rows import Row
from benchmarks.timing import Latency, latency

# An operator for this file: (q, k, v, g, beta, initial_state, boundaries) -> (o, final_state).
Operator = Callable[..., tuple[jax.Array, jax.Array]]
Step = Callable[[Any, jax.Array], tuple[tuple[jax.Array, ...], jax.Array]]


def forward_step(op: Operator) -> Step:
    def step(inputs: Inputs, state: jax.Array):
        o, final_state = op(*inputs[:5], state, inputs.cu_seqlens)
        return (o,), final_state

    return step


def gradient_step(op: Operator) -> Step:
    """Forward and backward, as in a training step."""

    def step(inputs: Inputs, state: jax.Array):
        (o, final_state), vjp = jax.vjp(lambda *xs: op(*xs, inputs.cu_seqlens), *inputs[:5], state)
        *gradients, dinitial_state = vjp((inputs.do, inputs.dfinal_state))
        return (o, final_state, *gradients), dinitial_state

    return step


def backward_step(residuals: Any, dfinal_state: jax.Array):
    """Backward alone, from what the forward pass left."""
    vjp, do = residuals
    *gradients, dinitial_state = vjp((do, dfinal_state))
    return tuple(gradients), dinitial_state


NAMES = {
    "forward": ("o", "final_state"),
    "backward": GRADIENTS,
    "forward_backward": ("o", "final_state", *GRADIENTS),
}


class JaxCase:
    """Compiles without data (so that many can be compiled at once), then binds the sets, checks and replays."""

    framework = "jax"

    def __init__(self, row: Row, direction: str, op: Operator, arrange: Callable[[Row, Inputs], Inputs], calls: int):
        self.row, self.direction = row, direction
        self.calls = calls
        self._arrange = jax.jit(lambda inputs: arrange(row, inputs))
        inputs = jax.eval_shape(self._arrange, abstract_inputs(row, gradients=direction != "forward"))
        if direction == "backward":
            self._residuals = self._lower_residuals(op, inputs)
            operands, state = (self._residuals.out_info, inputs.do), inputs.dfinal_state
            operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
            step = backward_step
            self._residuals = self._residuals.compile()
        else:
            operands, state = inputs, inputs.initial_state
            step = forward_step(op) if direction == "forward" else gradient_step(op)
        self._compile(jax.jit(step), operands, state)

    @staticmethod
    def _lower_residuals(op: Operator, inputs: Inputs):
        def residuals(inputs: Inputs):
            return jax.vjp(lambda *xs: op(*xs, inputs.cu_seqlens), *inputs[:5], inputs.initial_state)[1]

        return jax.jit(residuals).lower(inputs)

    def _compile(self, step: Any, operands: Any, state: Any) -> None:
        def program(several: Sequence[Any], state: jax.Array, recycled: Any = None):
            del recycled
            results = []
            for operands in several:
                result, state = step(operands, state)
                results.append((*result, state))
            return results

        # Several calls of one jitted function are lowered once.
        self._single = step.lower(operands, state).compile()
        several = [operands] * self.calls
        self._empty = jax.eval_shape(program, several, state)
        # Donated results come back at the same addresses, so a captured graph need not be updated.
        repeated = jax.jit(program, donate_argnums=2, keep_unused=True)
        self._program = repeated.lower(several, state, self._empty).compile()

    def bind(self, sets: Sequence[Inputs]) -> None:
        """Takes the sets, in this implementation's arrangement, and allocates the results."""
        arranged = [self._arrange(inputs) for inputs in sets]
        if self.direction == "backward":
            operands = [(self._residuals(x), x.do) for x in arranged]
            self._state = arranged[0].dfinal_state
        else:
            operands = arranged
            self._state = arranged[0].initial_state
        self._first = operands[0]
        num = len(operands)
        self._several = [
            [operands[(run * self.calls + i) % num] for i in range(self.calls)]
            for run in range(_cycle(num, self.calls))
        ]
        self._results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._empty)
        self._runs = 0
        jax.block_until_ready((self._several, self._results))

    def results(self) -> dict[str, np.ndarray]:
        """Results of the first call of a replay, on the first set; of the heads that are compared."""
        self._runs = 0
        self.replay(1)
        named = zip(NAMES[self.direction], self._results[0], strict=True)
        return {name: np.asarray(compared_heads(self.row, name, x)) for name, x in named}

    def replay(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            several = self._several[self._runs % len(self._several)]
            self._results = self._program(several, self._state, self._results)
            self._runs += 1
        jax.block_until_ready(self._results)
        return (time.perf_counter() - start) * 1e3

    def latency(self) -> Latency:
        return latency(lambda: self._single(self._first, self._state), jax.block_until_ready)

    def release(self) -> None:
        del self._several, self._results, self._first, self._state


def _cycle(sets: int, calls: int) -> int:
    """Runs after which the same sets come at the same places."""
    run = 1
    while run * calls % sets:
        run += 1
    return run

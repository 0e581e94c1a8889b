"""One row and direction of a PyTorch implementation, replayed as a CUDA graph.

Made as jax_case.py makes its program: a graph holds several calls over different sets, each call takes its state from
the one before, and the results of all calls stay alive. Where a peer cannot be captured the calls are timed as issued,
and the line says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.inputs import Inputs, to_torch
from benchmarks.jax_case import NAMES
from benchmarks.oracle import compared_heads
from benchmarks.rows import Row
from benchmarks.timing import Latency, latency

_WARM_UPS = 3


class TorchCase:
    """Binds the sets of a row to a peer's operator, checks and replays."""

    framework = "torch"

    def __init__(self, row: Row, direction: str, op: Callable[..., Any], arrange: Callable[..., Any], calls: int):
        self.row, self.direction, self.calls = row, direction, calls
        self._op, self._arrange = op, arrange
        self.replayed_as = "graph"
        self.note: str | None = None

    def bind(self, sets: Sequence[Inputs]) -> None:
        """Views the sets as torch tensors, warms the operator up on each and captures the graph."""
        import torch

        # One tensor of boundaries for all sets: peers keep what they read from it on the host by the tensor's identity.
        boundaries = to_torch(sets[0].cu_seqlens)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            views = [
                Inputs(*(None if x is None else to_torch(x) for x in inputs))._replace(cu_seqlens=boundaries)
                for inputs in sets
            ]
            arranged = [Inputs(*self._arrange(self.row, view)) for view in views]
            self._state = arranged[0].dfinal_state if self.direction == "backward" else arranged[0].initial_state
            self._operands = [self._prepare(inputs) for inputs in arranged]
            for _ in range(_WARM_UPS):
                for operands in self._operands:
                    self._step(operands, self._state)
        torch.cuda.synchronize()
        self._capture()

    def _prepare(self, inputs: Inputs) -> Any:
        if self.direction == "forward":
            return inputs
        leaves = [x.detach().requires_grad_() for x in inputs[:6]]
        if self.direction == "forward_backward":
            return inputs, leaves
        outputs = self._op(*leaves, inputs.cu_seqlens)
        return inputs, leaves, outputs

    def _step(self, operands: Any, state: Any) -> tuple[Any, ...]:
        """One call: its results, the last of which is the state of the next."""
        import torch

        if self.direction == "forward":
            with torch.no_grad():
                return self._op(*operands[:5], state, operands.cu_seqlens)
        if self.direction == "backward":
            inputs, leaves, outputs = operands
            return torch.autograd.grad(outputs, leaves, (inputs.do, state), retain_graph=True)
        inputs, leaves = operands
        leaves = (*leaves[:5], state.detach().requires_grad_())
        outputs = self._op(*leaves, inputs.cu_seqlens)
        gradients = torch.autograd.grad(outputs, leaves, (inputs.do, inputs.dfinal_state))
        return (*(x.detach() for x in outputs), *gradients)

    def _run(self) -> list[tuple[Any, ...]]:
        results, state = [], self._state
        for i in range(self.calls):
            results.append(self._step(self._operands[i % len(self._operands)], state))
            state = results[-1][-1]
        return results

    def _capture(self) -> None:
        import torch

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._results = self._run()
            self._launch = graph.replay
        except Exception as error:
            torch.cuda.synchronize()
            self.replayed_as, self.note = "eager", f"no CUDA graph: {str(error).splitlines()[0][:200]}"
            self._launch = self._issue

    def _issue(self) -> None:
        self._results = self._run()

    def results(self) -> dict[str, np.ndarray]:
        """Results of the first call of a replay, on the first set; of the heads that are compared."""
        self.replay(1)
        named = zip(NAMES[self.direction], self._results[0], strict=True)
        return {name: compared_heads(self.row, name, x).float().cpu().numpy() for name, x in named}

    def replay(self, count: int) -> float:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(count):
                self._launch()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def latency(self) -> Latency:
        import torch

        def call() -> Any:
            return self._step(self._operands[0], self._state)

        with torch.cuda.stream(self._stream):
            return latency(call, lambda _: torch.cuda.synchronize())

    def release(self) -> None:
        import torch

        self._launch = self._results = self._operands = self._state = None
        torch.cuda.empty_cache()

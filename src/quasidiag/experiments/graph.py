"""A training step replayed as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

Step = Callable[[Tensor, Tensor], None]

#: Ordinary steps before the capture, so that the optimizer's state exists and every library is initialised.
WARM_UP = 3


class GraphedStep:
    """``step(x, t)``, captured after a few ordinary calls and replayed from then on.

    The first calls are real training steps, only run on a side stream as a capture requires, so the
    results are those of the plain step. Where the capture is not possible the plain step goes on,
    and a warning says why.
    """

    def __init__(self, step: Step, optimizer: Optimizer) -> None:
        self._step, self._optimizer = step, optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0
        self._usable = True
        self._stream = torch.cuda.Stream()
        self._x: Tensor | None = None
        self._t: Tensor | None = None

    def __call__(self, x: Tensor, t: Tensor) -> None:
        if self._graph is not None:
            assert self._x is not None and self._t is not None
            self._x.copy_(x)
            self._t.copy_(t)
            self._graph.replay()
        elif self._calls < WARM_UP or not self._usable:
            self._calls += 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(x, t)
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._capture(x, t)
            self(x, t)

    def _capture(self, x: Tensor, t: Tensor) -> None:
        self._x, self._t = x.clone(), t.clone()
        graph = torch.cuda.CUDAGraph()
        generator = getattr(self._optimizer, "generator", None)
        if generator is not None:
            graph.register_generator_state(generator)
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        try:
            # "thread_local": other threads of the process may go on using the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step(self._x, self._t)
        except RuntimeError as error:
            self._usable = False
            self._optimizer.zero_grad(set_to_none=True)
            warnings.warn(f"no CUDA graph for this step: {error}", RuntimeWarning, stacklevel=3)
        else:
            self._graph = graph

"""CUDA graphs of decode steps: one launch for a step in place of one for each of its kernels.

A decode step of a small model takes as long as the CPU needs to launch its thousand kernels, whatever the
number of rows. A graph is captured once for a number of rows and of keys, and replayed with new inputs.

Invariant: a graph reads and writes the tensors it was captured with. `clear` must be called when rows move to
other tensors or weights change.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Steps of a shape before it is captured: they warm the kernels up, and rare shapes are not captured at all.
_EAGER_STEPS: Final = 4


class DecodeGraphs:
    """The captured decode steps of one model, by shape. Used from one thread only."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self._steps: Counter[tuple[int, int]] = Counter()
        self._pool: Any = None
        self._is_capturable = True

    def run(self, shape: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
        """Returns what `compute` returns for its current inputs. The tensor is valid until the next step."""
        self._steps[shape] += 1
        if self._is_capturable and shape not in self._graphs and self._steps[shape] > _EAGER_STEPS:
            self._capture(shape, compute)
        if shape not in self._graphs:
            return compute()
        graph, output = self._graphs[shape]
        graph.replay()
        return output

    def clear(self) -> None:
        """Drops all graphs and their memory."""
        self._graphs.clear()
        self._steps.clear()
        self._pool = None

    def _capture(self, shape: tuple[int, int], compute: Callable[[], Tensor]) -> None:
        cuda: Any = torch.cuda
        graph, stream = cuda.CUDAGraph(), cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        self._pool = self._pool or cuda.graph_pool_handle()
        try:
            with cuda.stream(stream):
                # Another thread, such as a trainer's, may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = compute()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            # Some models read a value back from the device in every step.
            logger.warning(
                "decode steps are launched kernel by kernel: this model cannot be captured: %s", error
            )
            self._is_capturable = False
            self.clear()
            return
        cuda.current_stream().wait_stream(stream)
        self._graphs[shape] = graph, output

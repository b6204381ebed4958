"""Linear layers over few rows, as a step of a few sessions has them.

For a few rows the matrix product that torch asks for on a CPU takes longer than reading the weights: two
rows cost nearly twice what one costs, three cost more than eight. The same product the other way round,
weights times rows, does not, as long as the rows fit the nearest cache (docs/decisions/0011).

Its invariant: the result is that of `nn.Linear` but for rounding; a model that is trained beside the engine
notices nothing.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

_MAX_INPUT_SIZE: Final = 4096
"""So many numbers of the rows stay near while the weights pass by; beyond, the usual way is faster."""


class SmallBatchLinear(nn.Linear):  # type: ignore[misc, unused-ignore]  # types are checked without torch too
    """`nn.Linear`, turned round where that is faster."""

    def forward(self, input: Tensor) -> Tensor:
        size, width = input.numel(), input.shape[-1]
        if not (width < size <= _MAX_INPUT_SIZE and torch.is_inference_mode_enabled()):
            output: Tensor = super().forward(input)
            return output
        output = torch.mm(self.weight, input.reshape(-1, width).t()).t()
        if self.bias is not None:
            output = output + self.bias
        return output.contiguous().view(*input.shape[:-1], -1)


def install(model: Any) -> None:
    """Has a model's linear layers compute this way where they are plain ones in float32 on a CPU."""
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        if module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.__class__ = SmallBatchLinear

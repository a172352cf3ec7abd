"""A recurrent cell whose state stays bounded, for the recurrent capsule network.

References:
    Greff, Srivastava, Koutnik, Steunebrink & Schmidhuber 2017, "LSTM: A Search Space Odyssey"
    (arXiv 1503.04069) on coupled gates.
"""

from __future__ import annotations

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.networks.leading import joined


class CoupledLSTM(PyroModule):
    """An LSTM whose input gate is one minus its forget gate.

        f, o, g = linear(inputs, h),    s' = f s + (1 - f) tanh(g),    h' = o tanh(s')

    Gates are logistic. The new cell lies between the old cell and tanh(g), so that no cell ever
    leaves [-1, 1], after any number of steps. With a free input gate cells can grow by 1 a step.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.gates = PyroModule[nn.Linear](inputs + units, 3 * units)
        nn.init.normal_(self.gates.weight, std=(inputs + units) ** -0.5)
        nn.init.zeros_(self.gates.bias)

    def forward(self, inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        forget, output, new = self.gates(joined([inputs, hidden], -1)).chunk(3, -1)
        # The cell keeps its precision under autocast, where the gates have less
        cell = torch.lerp(new.tanh().to(cell), cell, forget.sigmoid().to(cell))
        return output.sigmoid() * cell.tanh(), cell

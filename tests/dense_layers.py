"""Dense recurrent layers to compare with: PyTorch's, and cells that it lacks, with the same interface."""

from __future__ import annotations

from typing import Any

import torch

# Cells of PyTorch's layers, and the limit of the clipped relu below.
OF_TORCH = ("tanh", "relu", "lstm", "gru")
LIMIT = 0.7


class _Layer:
    """One layer in one direction, by formula."""

    def forward(self: Any, x: Any, hx: Any) -> tuple[Any, Any]:
        projected = x @ self.weight_ih_l0.T + self.bias_ih_l0 + self.bias_hh_l0
        h, outputs = hx[0], []
        for step in projected:
            h = self.step(step, h)
            outputs.append(h)
        return torch.stack(outputs), h[None]


class ClippedRNN(_Layer, torch.nn.RNN):
    def step(self, x: Any, h: Any) -> Any:
        return torch.nn.functional.hardtanh(x + h @ self.weight_hh_l0.T, 0, LIMIT)


class ResetBeforeGRU(_Layer, torch.nn.GRU):
    def step(self, x: Any, h: Any) -> Any:
        (x_r, x_z, x_n), (u_r, u_z, u_n) = x.chunk(3, 1), self.weight_hh_l0.chunk(3)
        r, z = torch.sigmoid(x_r + h @ u_r.T), torch.sigmoid(x_z + h @ u_z.T)
        return (1 - z) * torch.tanh(x_n + (r * h) @ u_n.T) + z * h


def dense_layer(cell: str, inputs: int, hidden: int) -> Any:
    """A layer of PyTorch's, or one that has its interface."""
    kinds: dict[str, Any] = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    kinds |= {"clipped_relu": ClippedRNN, "gru_reset_before": ResetBeforeGRU}
    options = {"nonlinearity": cell} if cell in ("tanh", "relu") else {}
    return kinds.get(cell, torch.nn.RNN)(inputs, hidden, **options)

"""Recurrent layers with a gradient, for PyTorch: the forward operators, and `recurrent_backward` on the way back.

A forward pass keeps its inputs and its output. The backward pass computes the sums U h of all steps again by one dense
product, since the states are known, takes the steps back by `recurrent_backward`, and makes the gradient of the stored
weights of one dense product over steps and sequences, of which it gathers the elements of the pattern. Tensor
cores compute the other elements in less time than gathers for a sampled product would take.

This module needs PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from tvm_sparse.formats.block_recurrent import BlockRecurrentWeights, value_places
from tvm_sparse.formats.recurrent import RecurrentWeights, banks_for, entry_words, transposed_layout

from ..sparse_recurrent.problem import EXCHANGES, rounded_limit
from .call import TransposedWeight, recurrent_backward

Weights = RecurrentWeights | BlockRecurrentWeights


def packed(values: Any, columns: Any, words: int) -> Any:
    """`formats.recurrent.pack_entries` of tensors on a device; the values have the dtype of the weight."""
    if words == 1:
        return (columns | values.view(torch.int16).int() << 16)[:, None]
    return torch.stack([values.float().view(torch.int32), columns], 1)


class Pattern:
    """The structure of a weight on a device: what makes kernel arguments of values, and gradients of values.

    Values are in the order of the weight's `coordinates()`.
    """

    def __init__(self, weights: Weights, device: Any) -> None:
        self.weights, self.device = weights, device
        self.hidden, self.gates, self.dtype = weights.hidden, weights.gates, getattr(torch, weights.dtype)
        self._rows, self._columns, own = weights.coordinates()
        # Where each value is in the dense weight.
        self.places = self._on(self._rows * self.hidden + self._columns)
        self.own = self._on(own).to(self.dtype)
        self._forward: dict[int, Any] = {}
        self._transposed: dict[Any, Any] = {}
        self._constant: dict[Any, Any] = {}

    def _on(self, array: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def placed(self, values: Any, batch: int) -> Weights:
        """The weight with other values, on the device, for a call with this batch; `values` None: its own."""
        if values is None:
            return self.weights
        if isinstance(self.weights, BlockRecurrentWeights):
            parts = self._of_blocks(values)
            return dataclasses.replace(self.weights, placed={self.device: parts})
        arranged = self.weights.laid_out_for(batch)
        found = self._forward.get(arranged.banks)
        if found is None:
            rows, columns, _ = arranged.coordinates()
            key, other = self._rows * self.hidden + self._columns, rows * self.hidden + columns
            sort = np.argsort(key)
            order = sort[np.searchsorted(key[sort], other)]
            fixed = (self._on(arranged.units), self._on(arranged.row_start))
            found = *fixed, self._on(columns.astype(np.int32)), self._on(order)
            self._forward[arranged.banks] = found
        units, row_start, columns, order = found
        entries = self._entries(values[order], columns, entry_words(self.hidden, self.weights.dtype))
        return dataclasses.replace(arranged, order="", placed={self.device: (units, row_start, entries)})

    def _of_blocks(self, values: Any) -> tuple[Any, ...]:
        weights = self.weights
        assert isinstance(weights, BlockRecurrentWeights)
        if "blocks" not in self._constant:
            start, groups, held = weights.held
            places = value_places(weights.hidden, weights.gates, weights.group_start, weights.groups)
            self._constant["blocks"] = self._on(start), self._on(groups), self._on(places), held.shape
        start, groups, places, shape = self._constant["blocks"]
        blocks = values.new_zeros(shape)
        blocks.view(-1)[places] = values
        return start, groups, blocks

    @staticmethod
    def _entries(values: Any, columns: Any, words: int) -> Any:
        """Packed entries; one that belongs to no row if there are none."""
        return packed(values, columns, words) if len(values) else columns.new_zeros((1, words))

    def dense(self, values: Any) -> Any:
        """`(gates * hidden, hidden)`."""
        if values is None:
            if "dense" not in self._constant:
                self._constant["dense"] = self.dense(self.own)
            return self._constant["dense"]
        found = values.new_zeros(self.gates * self.hidden, self.hidden)
        found.view(-1)[self.places] = values
        return found

    def transposed(self, values: Any, batch: int, parts: int) -> TransposedWeight:
        """The transposed weight, laid out for a batch; each row is cut into `parts`."""
        key = parts, banks_for(batch, self.weights.dtype)
        if values is None:
            if ("transposed", key) not in self._constant:
                self._constant["transposed", key] = self.transposed(self.own, batch, parts)
            return self._constant["transposed", key]
        found = self._transposed.get(key)
        if found is None:
            layout = transposed_layout(self._rows, self._columns, self.hidden, self.gates, key[1], parts)
            fixed = (self._on(layout.units), self._on(layout.row_start))
            longest = int(np.diff(layout.row_start).max(initial=0)) * parts
            found = *fixed, self._on(layout.columns.astype(np.int32)), self._on(layout.places), longest
            self._transposed[key] = found
        units, row_start, columns, places, longest = found
        words = entry_words(self.gates * self.hidden, self.weights.dtype)
        entries = self._entries(values[places], columns, words)
        sizes = self.hidden, self.gates, self.weights.dtype, len(places)
        return TransposedWeight(*sizes, units, row_start, entries, longest)


def pattern_of(weights: Weights, device: Any) -> Pattern:
    """The pattern of a weight on a device; made once and kept by the weight."""
    found = weights.patterns.get(device)
    if found is None:
        # No tensors of inference mode, which later calls could not keep for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            found = weights.patterns[device] = Pattern(weights, device)
    return found


class _Layer(torch.autograd.Function):
    """A layer's call: `run` is its forward operator, and `settings` are limit, lengths and resets as the caller gave
    them.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], pattern: Pattern, cell: str, settings: tuple[Any, Any, Any], values: Any,
        x: Any, h0: Any, c0: Any, hidden_bias: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        states = [one.detach() for one in (x, h0, c0) if one is not None]
        bias = None if hidden_bias is None else hidden_bias.detach()
        weights = pattern.placed(values, x.shape[1] if x.dim() == 3 else 1)
        limit, lengths, resets = settings
        found = run(weights, *states, hidden_bias=bias, limit=limit, lengths=lengths, resets=resets)
        ctx.pattern, ctx.cell = pattern, cell
        ctx.limit = None if limit is None else rounded_limit(limit, weights.dtype)
        marks = [None if one is None else torch.as_tensor(one).to(x.device, torch.int32) for one in (lengths, resets)]
        ctx.save_for_backward(values, None if pattern.gates == 1 else x, h0, c0, hidden_bias, *marks, found[0])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        values, x, h0, c0, hidden_bias, lengths, resets, output = ctx.saved_tensors
        pattern, cell = ctx.pattern, ctx.cell
        steps, batch, hidden = output.shape
        before = torch.cat([h0[None], output[:-1]]) if steps else output
        if resets is not None:
            before = before.masked_fill(resets[:, :, None] != 0, 0)
        if steps and batch:
            kept, scaled = _kept(cell, pattern.dense(values), x, before, output, hidden_bias)
            if ctx.limit is not None:
                kept = kept.masked_fill(kept >= ctx.limit, 0)
            found = recurrent_backward(
                pattern.transposed(values, batch, pattern.gates if cell in EXCHANGES else 1),
                kept,
                before if pattern.gates == 3 else None,
                c0,
                *(*gradients, None)[:3],
                cell="relu" if cell == "clipped_relu" else cell,
                lengths=lengths,
                resets=resets,
            )
        else:
            none, scaled = output.new_zeros((steps, batch, pattern.gates * hidden)), None
            found = (none, *([output.new_zeros(output.shape)] if cell == "gru" else []), *gradients[1:])
        sums, of_values, of_bias = found[0], None, None
        if ctx.needs_input_grad[4]:
            d, states = sums.reshape(steps * batch, -1), before.reshape(steps * batch, hidden)
            of_dense = d.mT @ states
            if scaled is not None:  # the candidate's rows multiply r * h
                of_dense[2 * hidden :] = d[:, 2 * hidden :].mT @ scaled
            of_values = of_dense.reshape(-1)[pattern.places]
        of_x = sums
        if cell == "gru":
            of_x = torch.cat([sums[:, :, : 2 * hidden], found[1]], 2)
            of_bias = sums[:, :, 2 * hidden :].sum((0, 1))
        of_h0, of_c0 = (found[-2], found[-1]) if cell == "lstm" else (found[-1], None)
        return None, None, None, None, of_values, of_x, of_h0, of_c0, of_bias


def _kept(cell: str, weight: Any, x: Any, before: Any, output: Any, hidden_bias: Any) -> tuple[Any, Any]:
    """The argument `kept` of `recurrent_backward`: for gates the sums of the forward pass, computed again. Second, for
    a reset before the product, the states times the reset gate `(steps * batch, hidden)`; else None.
    """
    if cell in ("tanh", "relu", "clipped_relu"):
        return output, None
    steps, batch, hidden = output.shape
    states = before.reshape(steps * batch, hidden)
    if cell == "lstm":
        return torch.addmm(x.reshape(steps * batch, -1), states, weight.mT).view(x.shape), None
    if cell == "gru_reset_before":
        kept, own = torch.empty_like(x), x.reshape(steps * batch, -1)
        flat = kept.view(own.shape)
        flat[:, : 2 * hidden] = torch.addmm(own[:, : 2 * hidden], states, weight[: 2 * hidden].mT)
        scaled = (flat[:, :hidden].sigmoid() * states).contiguous()
        flat[:, 2 * hidden :] = torch.addmm(own[:, 2 * hidden :], scaled, weight[2 * hidden :].mT)
        return kept, scaled
    products = (states @ weight.mT).view(x.shape)
    kept = x.new_empty((steps, batch, 4 * hidden))
    torch.add(x[:, :, : 2 * hidden], products[:, :, : 2 * hidden], out=kept[:, :, : 2 * hidden])
    kept[:, :, 2 * hidden : 3 * hidden] = x[:, :, 2 * hidden :]
    torch.add(products[:, :, 2 * hidden :], hidden_bias, out=kept[:, :, 3 * hidden :])
    return kept, None


def differentiable(
    run: Callable[..., Any],
    weights: Any,
    x_projected: Any,
    h0: Any,
    c0: Any = None,
    hidden_bias: Any = None,
    limit: Any = None,
    lengths: Any = None,
    resets: Any = None,
    *,
    cell: str,
    values: Any = None,
) -> tuple[Any, ...]:
    """A layer's call with gradients of x_projected, h0, c0, hidden_bias and values; other parameters and the results
    are the operator's.

    Parameters
    ----------
    run
        The forward operator `(weights, x_projected, h0[, c0], *, hidden_bias, limit, lengths, resets)` for the cell.
    values
        `(nonzeros,)` of the weights' dtype: values in the place of the weights' own, in the order of their
        `coordinates()`; None: these.
    """
    pattern = pattern_of(weights, x_projected.device)
    if cell == "gru" and hidden_bias is None:
        hidden_bias = x_projected.new_zeros(weights.hidden)
    settings = limit, lengths, resets
    return _Layer.apply(run, pattern, cell, settings, values, x_projected, h0, c0, hidden_bias)

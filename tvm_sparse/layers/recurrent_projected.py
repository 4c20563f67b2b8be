"""A layer of `torch.nn.LSTM` with `proj_size`, for `RecurrentStack`: states are projected before they recur.

With W_hh `(4 * hidden, proj)` and W_hr `(proj, hidden)`, m[t] = o * tanh(c[t]) and h[t] = W_hr m[t], gates take
W_hh h[t-1] = (W_hh W_hr) m[t-1]. The product of the two weights, *folded*, is a recurrent weight over m, so that the
kernels of `SparseLSTM` run; all h follow by one product at the end. One exchange between units per step takes the place
of two. The price: the folded weight is dense, however W_hh was pruned, with 4 * hidden^2 values instead of
5 * proj * hidden.

Gradients of W_hh and W_hr are those of their product, by autograd.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from ..core.problem import numpy_dtype
from ..formats.block_recurrent import lay_out_blocks
from ..formats.recurrent import RecurrentWeights, lay_out
from ..operators.recurrent_backward.autograd import pattern_of
from .libraries import to_host
from .pruning import BLOCK, prune
from .recurrent import LayerExplanation, SparseLSTM
from .recurrent_weights import FEW_BYTES, Weights, prepared


class ProjectedLSTM(SparseLSTM):
    """One layer and direction; calls take torch tensors and states `(batch, proj)` and `(batch, hidden)`.

    Attributes
    ----------
    weights
        W_hh as entries, with columns from `proj` to `hidden` that are empty.
    projection
        W_hr on the host.
    """

    projection: np.ndarray

    def __init__(
        self,
        weight_hh: torch.Tensor,
        projection: torch.Tensor,
        *,
        density: float | None = None,
        method: str = "magnitude",
        block: int = BLOCK,
        dtype: str,
        order: str = "banks",
    ) -> None:
        if density is not None:
            weight_hh = prune(weight_hh, density, method=method, block=block, gates=4)
        proj, hidden = projection.shape
        wide = np.pad(to_host(weight_hh), ((0, 0), (0, hidden - proj)))
        self._set(prepared(wide, 4, dtype, "entries", order), "lstm", None)
        self.projection = to_host(projection).astype(numpy_dtype(dtype))

    def _set(self, weights: Weights, cell: str, device: Any) -> None:
        super()._set(weights, cell, device)
        self._folded: SparseLSTM | None = None

    @property
    def proj(self) -> int:
        """Elements of a projected state."""
        return self.projection.shape[0]

    @property
    def density(self) -> float:
        """Share of nonzeros in W_hh."""
        return self.weights.density * self.hidden / self.proj

    @property
    def folded(self) -> SparseLSTM:
        """The layer over unprojected states, with all values of the folded weight; made at the first call, and kept."""
        if self._folded is None:
            rows, columns = np.divmod(np.arange(4 * self.hidden**2), self.hidden)
            with np.errstate(all="ignore"):
                whole = self.weights.dense()[:, : self.proj].astype(np.float32) @ self.projection.astype(np.float32)
            given = rows, columns, whole.reshape(-1), self.hidden, 4, self.dtype
            weights = lay_out_blocks(*given) if numpy_dtype(self.dtype).itemsize == 2 else lay_out(*given, "columns")
            self._folded = SparseLSTM(weights)
        return self._folded

    def dense_weight(self, values: Any, device: Any) -> Any:
        """W_hh `(4 * hidden, proj)` on a device; `values` `(nonzeros,)` in the place of its own."""
        return pattern_of(self.weights, device).dense(values)[:, : self.proj]

    def _call(
        self,
        x_projected: Any,
        states: tuple[Any, ...],
        resets: Any,
        lengths: Any,
        out: Any,
        values: Any = None,
        hidden_bias: Any = None,
        projection: Any = None,
    ) -> tuple[Any, ...]:
        """`values` and `projection`: parameters of PyTorch in the place of W_hh's entries and W_hr."""
        assert out is None and hidden_bias is None
        (h0, c0), folded_values = states, None
        own = self._placed("projection", self.projection, x_projected) if projection is None else projection
        weight = self.dense_weight(values, x_projected.device)
        if values is not None:
            places = pattern_of(self.folded.weights, x_projected.device).places
            folded_values = (weight @ own).reshape(-1)[places]
        if h0 is not None and len(x_projected):
            first = torch.nn.functional.linear(h0, weight)
            if resets is not None:
                first = first.masked_fill(resets[0, :, None] != 0, 0)
            x_projected = torch.cat([x_projected[:1] + first, x_projected[1:]])
        m, m_n, c_n = self.folded._call(x_projected, (None, c0), resets, lengths, None, folded_values)
        output, h_n = torch.nn.functional.linear(m, own), torch.nn.functional.linear(m_n, own)
        if h0 is not None and lengths is not None:
            h_n = torch.where((lengths > 0)[:, None], h_n, h0)
        return output, h0 if h0 is not None and not len(m) else h_n, c_n

    def explain(
        self, steps: int, batch: int, *, resets: bool = False, lengths: bool = False, target: str = "auto"
    ) -> LayerExplanation:
        """As in `SparseLSTM`, for the folded weight."""
        return self.folded.explain(steps, batch, resets=resets, lengths=lengths, target=target)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_folded": None}

    def _like(self, weights: Weights, device: Any, projection: np.ndarray | None = None) -> Self:
        found = super()._like(weights, device)
        found.projection = (self.projection if projection is None else projection).astype(numpy_dtype(weights.dtype))
        return found

    def parts(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        held, meta = super().parts()
        return {**held, "projection": self.projection}, meta

    @classmethod
    def assembled(cls, held: dict[str, np.ndarray], meta: dict[str, Any], device: Any, source: str) -> Self:
        layer = super().assembled(held, meta, device, source)
        projection, weights = held["projection"], layer.weights
        fits = isinstance(weights, RecurrentWeights) and projection.ndim == 2
        if not fits or projection.shape[1] != layer.hidden or projection.dtype != numpy_dtype(layer.dtype):
            raise ValueError(f"{source}: projection: expected shape (proj, {layer.hidden}) and dtype {layer.dtype}")
        if not 0 < len(projection) < layer.hidden or (weights.coordinates()[1] >= len(projection)).any():
            raise ValueError(f"{source}: projection: expected columns of the weight below proj={len(projection)}")
        layer.projection = projection
        return layer


def stays_on_chip(hidden: int, dtype: str) -> bool:
    """Whether a folded weight stays on a large GPU's chip."""
    size = numpy_dtype(dtype).itemsize
    return size == 2 and 4 * hidden**2 * size <= FEW_BYTES

"""Recurrent layers with sparse recurrent weights: prepared once, called with a projected input.

A layer holds its weights in the layout of the kernels, and splits a call into launches of at most `BATCH` sequences
(`TILES_BATCH` on tensor cores), and of as many steps as the workspace for the exchange between thread blocks allows. It
has no kernels of its own.

Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from ..core import machine
from ..core.problem import FLOATS, Problem, numpy_dtype
from ..formats.block_recurrent import BlockRecurrentWeights
from ..formats.recurrent import RecurrentWeights
from ..operators.sparse_recurrent.call import input_facts, with_gradient
from ..operators.sparse_recurrent.problem import GATES, rounded_limit
from ..runtime import arrays
from ..runtime.arrays import Facts
from ..runtime.calls import check_device, facts_beside, machine_of, outputs_for
from ..runtime.dispatch import Explanation, dispatcher
from . import storage
from .captured import CapturedLayer
from .libraries import TORCH, kept, library, to_host
from .pruning import BLOCK, prune
from .recurrent_weights import (
    Weights,
    as_blocks,
    assembled,
    fits_as_blocks,
    form_of,
    launch_problem,
    of_dtype,
    parts_of,
    prepared,
    run,
)

FORMAT = 1  # of files written by `save`
NONLINEARITIES = ("tanh", "relu", "clipped_relu")
# Most sequences of a launch: with entries, and with blocks on tensor cores.
BATCH, TILES_BATCH = 16, 256
# Most bytes of hidden states over all steps of a launch: kernels that exchange them by polling keep all of them.
EXCHANGED = 1 << 26
LEAST_STEPS = 64


@dataclass(frozen=True)
class LayerExplanation:
    """The result of a layer's `explain`: the launches of a call, and the kernel of each.

    Attributes
    ----------
    launches
        `(steps, batch)` of each launch, in order.
    kernels
        The kernel of each launch, as from `tvm_sparse.explain`.
    way
        Which way calls of a `RecurrentStack` take, and why; None for a layer alone, which runs its kernels. For a layer
        with projected states that runs PyTorch's, there are no launches beside.
    """

    launches: tuple[tuple[int, int], ...]
    kernels: tuple[Explanation, ...]
    way: str | None = None

    def __str__(self) -> str:
        shapes = ", ".join(f"{steps} steps of {batch}" for steps, batch in self.launches) or "nothing to compute"
        count = f"{len(self.launches)} launch{'es' * (len(self.launches) != 1)}"
        told = [] if self.way is None else [f"calls take {self.way}"]
        if told and not self.kernels:
            return told[0]
        return "\n".join([*told, f"{count}: {shapes}", *map(str, dict.fromkeys(map(str, self.kernels)))])


def project_inputs(x: Any, weight_ih: Any, bias_ih: Any = None, bias_hh: Any = None, *, cell: str) -> Any:
    """The input of a layer: x @ weight_ih.T plus the biases that do not depend on the state.

    x_projected = x W_ih^T + b_ih + b_hh; for the last gate of "gru" without b_hh, which is the layer's `hidden_bias`.

    Parameters
    ----------
    x
        `(..., input)` torch tensor or NumPy array.
    weight_ih
        `(gates * hidden, input)` in the library and dtype of `x`, gates in torch's order.
    bias_ih, bias_hh
        `(gates * hidden,)` or None.
    cell
        As in `sparse_recurrent`.

    Returns
    -------
    x_projected
        `(..., gates * hidden)`, computed as a dense product by the library of `x`.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, naming them.
    """
    if cell not in GATES:
        raise ValueError(f"cell: expected one of {', '.join(GATES)}, got {cell!r}")
    kind = library("x", x)
    for name, array in (("x", x), ("weight_ih", weight_ih), ("bias_ih", bias_ih), ("bias_hh", bias_hh)):
        if array is None and name.startswith("bias"):
            continue
        if library(name, array) is not kind:
            raise TypeError(f"{name}: expected an array of x's library, got {type(array).__name__}")
        if kind is not TORCH:
            arrays.facts(name, array)  # refuses masked arrays
    width, shapes = x.shape[-1] if len(x.shape) else 0, tuple(weight_ih.shape)
    if len(shapes) != 2 or shapes[0] % GATES[cell] or shapes[1] != width:
        raise ValueError(f"weight_ih: expected shape ({GATES[cell]} * hidden, {width}), got {shapes}")
    for name, bias in (("bias_ih", bias_ih), ("bias_hh", bias_hh)):
        if bias is not None and tuple(bias.shape) != shapes[:1]:
            raise ValueError(f"{name}: expected shape {shapes[:1]}, got {tuple(bias.shape)}")
    for name, array in (("weight_ih", weight_ih), ("bias_ih", bias_ih), ("bias_hh", bias_hh)):
        if array is not None and array.dtype != x.dtype:
            raise ValueError(f"{name}: expected the dtype of x, {x.dtype}, got {array.dtype}")
    bias = projected_bias(bias_ih, bias_hh, cell)
    if kind is TORCH:
        import torch

        return torch.nn.functional.linear(x, weight_ih, bias)
    # In 16 bits, the biases are added in float32, and rounded once.
    found = x.astype(np.float32) @ weight_ih.T.astype(np.float32) if x.dtype.itemsize == 2 else x @ weight_ih.T
    return (found if bias is None else found + bias).astype(x.dtype, copy=False)


def projected_bias(bias_ih: Any, bias_hh: Any, cell: str) -> Any:
    """The bias of a projection, see `project_inputs`; None if there is none."""
    if bias_hh is not None and cell == "gru":
        outside = 2 * bias_hh.shape[0] // 3
        zeros = bias_hh[outside:] * 0
        bias_hh = library("bias_hh", bias_hh).concatenate([bias_hh[:outside], zeros], 0)
    if bias_ih is None or bias_hh is None:
        return bias_hh if bias_ih is None else bias_ih
    return bias_ih + bias_hh


def launches(steps: int, batch: int, hidden: int, most: int = BATCH) -> tuple[tuple[int, int], ...]:
    """Steps and sequences of each launch of a call, for a layer with `hidden` units, and `most` sequences a launch."""
    parts = _parts(steps, batch, hidden, most)
    return tuple((time.stop - time.start, rows.stop - rows.start) for time, rows in parts)


def _parts(steps: int, batch: int, hidden: int, most: int) -> Iterator[tuple[slice, slice]]:
    """As `launches`, but as slices of steps and sequences; launches of the same sequences are in the order of time."""
    for first in range(0, batch, most):
        rows = min(most, batch - first)
        length = max(LEAST_STEPS, EXCHANGED // (4 * hidden * rows))
        for begin in range(0, steps, length):
            yield slice(begin, min(steps, begin + length)), slice(first, first + rows)


class _Layer:
    """Common base of the three layers."""

    weights: Weights
    cell: str
    cells: ClassVar[tuple[str, ...]]  # the cells that a class supports
    hidden_bias: np.ndarray | None = None  # on the host, for "gru"
    limit: float | None = None  # of states, for a clipped relu

    def __init__(
        self,
        weight_hh: Any,
        cell: str,
        density: float | None,
        method: str,
        block: int,
        dtype: str | None,
        form: str,
        order: str,
        device: Any,
    ) -> None:
        if isinstance(weight_hh, (RecurrentWeights, BlockRecurrentWeights)):
            if density is not None or dtype not in (None, weight_hh.dtype) or form not in ("auto", form_of(weight_hh)):
                raise ValueError("weight_hh: is prepared already; density, dtype and form are its own")
            weights: Weights = weight_hh
        else:
            if density is not None:
                if not (arrays.is_numpy(weight_hh) or arrays.is_torch(weight_hh) and _is_dense(weight_hh)):
                    raise ValueError(
                        "density: is for a dense weight, a NumPy array or a torch tensor; a sparse one keeps the"
                        " entries that it has"
                    )
                options: dict[str, Any] = {"method": method, "block": block, "gates": _gates_of(weight_hh, cell)}
                weight_hh = prune(weight_hh, density, **options)
            weights = prepared(weight_hh, GATES[cell], dtype, form, order)
        self._set(weights, cell, device)

    def _set(self, weights: Weights, cell: str, device: Any) -> None:
        if weights.gates != GATES[cell]:
            raise ValueError(f"weight_hh: expected {GATES[cell]} gates, got {weights.gates}")
        self.weights, self.cell = weights, cell
        self.device = None if device is None else str(device)
        self._constants: dict[Any, Any] = {}
        self._tiles: BlockRecurrentWeights | None = None  # of a weight of entries, for many sequences

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weights}, cell={self.cell!r}, device={self.device!r})"

    @property
    def hidden(self) -> int:
        """Number of units."""
        return self.weights.hidden

    @property
    def dtype(self) -> str:
        """Dtype of the weights, and of all inputs and outputs."""
        return self.weights.dtype

    @property
    def density(self) -> float:
        """Share of the recurrent weight's values that are stored."""
        return self.weights.density

    @property
    def form(self) -> str:
        """The form of the weights: "entries" or "blocks"."""
        return form_of(self.weights)

    # ---- calls -----------------------------------------------------------------------------------

    def _call(
        self,
        x_projected: Any,
        states: tuple[Any, ...],
        resets: Any,
        lengths: Any,
        out: Any,
        values: Any = None,
        hidden_bias: Any = None,
    ) -> tuple[Any, ...]:
        """`values` and `hidden_bias`: parameters of PyTorch in the place of the layer's own, see `RecurrentStack`."""
        shape = tuple(getattr(x_projected, "shape", ()))
        given: dict[str, Any] = {"values": values, "hidden_bias": hidden_bias}
        gradient = with_gradient(x_projected, *states, values, hidden_bias)
        # Gradients of all gates are exchanged on the way back.
        width = self.hidden * (self.weights.gates if gradient else 1)
        weights, most, parts = self.weights, BATCH, []
        if len(shape) == 3:
            if shape[1] > BATCH and values is None and not gradient and arrays.is_torch(x_projected):
                where = machine_of("x_projected", arrays.facts("x_projected", x_projected))
                weights, most = self._of_call(shape[1], where)
            parts = list(_parts(shape[0], shape[1], width, most))
        given |= {"weights": weights}
        if len(parts) == 1 and resets is None and lengths is None:
            # If there is a single launch, the operator checks the arguments.
            states = tuple(self._zeros(x_projected) if state is None else state for state in states)
            return self._launch(x_projected, states, None, None, out, **given)
        known = self._check(x_projected)
        names = ("h0", "c0")[: len(states)]
        wanted = (shape[1], self.hidden)
        for name, state in zip(names, states, strict=True):
            if state is not None:
                facts_beside(name, _plain(state), wanted, self.dtype, known, "x_projected is")
        states = tuple(self._zeros(x_projected) if state is None else state for state in states)
        resets, lengths = self._resets(resets, known), checked_lengths(lengths, x_projected, *shape[:2])
        if len(parts) == 1:
            return self._launch(x_projected, states, resets, lengths, out, **given)
        if gradient:
            if out is not None:
                raise RuntimeError("out: a gradient is wanted, and none goes through `out`; call it without")
            return self._joined(parts, x_projected, states, resets, lengths, given)
        shapes = [("output", (*known.shape[:2], self.hidden)), *((f"{name[0]}_n", wanted) for name in names)]
        outputs = outputs_for(out, tuple((name, shape, self.dtype) for name, shape in shapes), x_projected, known)
        for place, state in zip(outputs[1:], states, strict=True):
            place[...] = state
        for time, rows in parts:
            found = self._launch(
                x_projected[time, rows],
                tuple(place[rows] for place in outputs[1:]),
                None if resets is None else resets[time, rows],
                None if lengths is None else self._left(lengths[rows], time),
                None,
                **given,
            )
            outputs[0][time, rows] = found[0]
            for place, state in zip(outputs[1:], found[1:], strict=True):
                place[rows] = state
        return tuple(outputs)

    def _joined(
        self,
        parts: list[tuple[slice, slice]],
        x: Any,
        states: tuple[Any, ...],
        resets: Any,
        lengths: Any,
        given: dict[str, Any],
    ) -> tuple[Any, ...]:
        """The results of several launches, joined by operators with a gradient."""
        import torch

        outputs, ends = [], []
        for rows, times in itertools.groupby(parts, key=lambda part: part[1]):
            own, found = tuple(state[rows] for state in states), []
            for time, _ in times:
                output, *last = self._launch(
                    x[time, rows],
                    own,
                    None if resets is None else resets[time, rows],
                    None if lengths is None else self._left(lengths[rows], time),
                    None,
                    **given,
                )
                found.append(output)
                own = tuple(last)
            outputs.append(torch.cat(found))
            ends.append(own)
        return torch.cat(outputs, 1), *map(torch.cat, zip(*ends, strict=True))

    def _launch(
        self,
        x: Any,
        states: tuple[Any, ...],
        resets: Any,
        lengths: Any,
        out: Any,
        values: Any,
        hidden_bias: Any,
        weights: Weights,
    ) -> tuple[Any, ...]:
        if hidden_bias is None and self.hidden_bias is not None:
            hidden_bias = self._placed("hidden_bias", self.hidden_bias, x)
        return run(
            weights,
            x,
            *states,
            cell=self.cell,
            hidden_bias=hidden_bias,
            limit=self.limit,
            lengths=lengths,
            resets=resets,
            out=out,
            values=values,
        )

    def _of_call(self, batch: int, where: machine.Machine) -> tuple[Weights, int]:
        """The weights with which a batch is computed, and the most sequences of a launch.

        Many sequences in 16 bits are computed on tensor cores. A weight of entries is laid out as blocks for that, if
        it is so small that all of it stays on the chip.
        """
        own, able = self.weights, where.kind == "cuda" and numpy_dtype(self.dtype).itemsize == 2
        if batch <= BATCH or not able or dispatcher.batch_invariant:
            return own, BATCH
        if isinstance(own, BlockRecurrentWeights):
            return own, TILES_BATCH
        if not fits_as_blocks(own):
            return own, BATCH
        if self._tiles is None:
            self._tiles = as_blocks(own)
        return self._tiles, TILES_BATCH

    def launches(self, steps: int, batch: int, *, target: str = "auto") -> tuple[tuple[int, int], ...]:
        """Steps and sequences of each launch of a call. `target` is as in `tvm_sparse.explain`."""
        _, most = self._of_call(batch, machine.resolve(target))
        return launches(steps, batch, self.hidden, most)

    def problems(
        self, steps: int, batch: int, *, resets: bool = False, lengths: bool = False, target: str = "auto"
    ) -> dict[tuple[int, int], Problem]:
        """The problem of each shape of launch of a call; parameters are those of `explain`."""
        weights, _ = self._of_call(batch, machine.resolve(target))
        shapes = dict.fromkeys(self.launches(steps, batch, target=target))
        return {shape: launch_problem(weights, *shape, self.cell, ragged=lengths, resets=resets) for shape in shapes}

    def project_inputs(self, x: Any, weight_ih: Any, bias_ih: Any = None, bias_hh: Any = None) -> Any:
        """`x_projected` for inputs `(..., input)`, see `tvm_sparse.project_inputs`."""
        return project_inputs(x, weight_ih, bias_ih, bias_hh, cell=self.cell)

    def explain(
        self, steps: int, batch: int, *, resets: bool = False, lengths: bool = False, target: str = "auto"
    ) -> LayerExplanation:
        """The launches of a call with `(steps, batch, ...)`, and for each the kernel and the reason for it.

        `resets` and `lengths`: whether the call has these arguments. `target` is as in `tvm_sparse.explain`.
        """
        where = machine.resolve(target)
        shapes = self.launches(steps, batch, target=target)
        problems = self.problems(steps, batch, resets=resets, lengths=lengths, target=target)
        found = {shape: dispatcher.explain(problem, where) for shape, problem in problems.items()}
        return LayerExplanation(shapes, tuple(found[shape] for shape in shapes))

    def capture(self, steps: int, batch: int, *, resets: bool = False, lengths: bool = False) -> CapturedLayer:
        """Capture a call of one shape as a CUDA graph with fixed inputs and outputs: see `CapturedLayer`.

        It is captured on the layer's device, or on the current GPU if it has none.

        Raises
        ------
        ValueError
            If that is not a GPU.
        """
        device = self.device or "cuda"
        if not device.startswith("cuda"):
            raise ValueError(f"device: a CUDA graph needs a GPU, and the layer is for {device}; use layer.to('cuda')")
        import torch

        if not torch.cuda.is_available():
            raise ValueError("device: a CUDA graph needs a GPU, and torch finds none")
        kind = {"dtype": getattr(torch, self.dtype), "device": device}
        inputs = {"x_projected": torch.zeros((steps, batch, self.weights.gates * self.hidden), **kind)}
        inputs |= {name: torch.zeros((batch, self.hidden), **kind) for name in self._states()}
        if resets:
            inputs["resets"] = torch.zeros((steps, batch), dtype=torch.int32, device=device)
        if lengths:
            inputs["lengths"] = torch.full((batch,), steps, dtype=torch.int32, device=device)

        def step() -> tuple[Any, ...]:
            states = tuple(inputs[name] for name in self._states())
            return self._call(inputs["x_projected"], states, inputs.get("resets"), inputs.get("lengths"), None)

        return CapturedLayer(step, inputs)

    def _states(self) -> tuple[str, ...]:
        return ("h0", "c0") if self.cell == "lstm" else ("h0",)

    # ---- life ------------------------------------------------------------------------------------

    def to(self, device: Any = None, dtype: Any = None) -> Self:
        """The layer with another device, which `capture` uses, or another dtype (`astype`); itself if nothing changes.

        At the first call weights are copied to the inputs' device. A dtype, of torch or NumPy or its name, may be the
        only argument.
        """
        if dtype is None and (name := arrays.dtype_name(device)) in FLOATS:
            device, dtype = None, name
        found = self if dtype is None else self.astype(arrays.dtype_name(dtype))
        return found if device is None or str(device) == self.device else found._like(found.weights, device)

    def astype(self, dtype: str) -> Self:
        """The layer with weights, inputs and outputs in another dtype; itself if it is the same."""
        if dtype == self.dtype:
            return self
        if dtype not in FLOATS:
            raise ValueError(f"dtype: expected one of {', '.join(FLOATS)}, got {dtype!r}")
        return self._like(of_dtype(self.weights, dtype), self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_constants": {}, "_tiles": None}  # made again by calls

    def _like(self, weights: Weights, device: Any) -> Self:
        found = type(self).__new__(type(self))
        found._set(weights, self.cell, device)
        found.limit = self.limit
        if self.hidden_bias is not None:
            found.hidden_bias = self.hidden_bias.astype(numpy_dtype(weights.dtype))
        return found

    def save(self, path: str | Path) -> Path:
        """Write the layer to a file: `.safetensors` or `.npz`; without a suffix safetensors if installed, else npz.

        Returns
        -------
        path
            The path with its suffix. An existing file is replaced.
        """
        held, meta = self.parts()
        return storage.write(Path(path), held, {"format": FORMAT, **meta})

    def parts(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and numbers from which `assembled` makes the layer."""
        held, meta = parts_of(self.weights)
        if self.hidden_bias is not None:
            held["hidden_bias"] = self.hidden_bias
        limit = {} if self.limit is None else {"limit": self.limit}
        return held, {"cell": self.cell, **limit, **meta}

    @classmethod
    def load(cls, path: str | Path, *, device: Any = None) -> Self:
        """Load a layer written by `save`, for a device.

        Raises
        ------
        ValueError
            If the file is damaged, of another version or kind of layer, or does not describe a valid layer.
        """
        path = Path(path)
        held, meta = storage.read(path)
        if meta.get("format") != FORMAT:
            raise ValueError(f"{path}: format {meta.get('format')!r}; this version reads {FORMAT}")
        return cls.assembled(held, meta, device, str(path))

    @classmethod
    def assembled(cls, held: dict[str, np.ndarray], meta: dict[str, Any], device: Any, source: str) -> Self:
        """Make a layer from the result of `parts`, checked so that no kernel reads outside of its arrays. Errors name
        `source`.
        """
        cell = meta.get("cell")
        if cell not in cls.cells:
            raise ValueError(f"{source}: not a {cls.__name__}: cell {cell!r}")
        layer = cls.__new__(cls)
        try:
            weights = assembled(held, meta, GATES[cell])
            layer._set(weights, cell, device)
            if cell == "gru":
                bias = held["hidden_bias"]
                if bias.shape != (weights.hidden,) or bias.dtype != numpy_dtype(weights.dtype):
                    raise ValueError(f"hidden_bias: expected shape ({weights.hidden},) and dtype {weights.dtype}")
                layer.hidden_bias = bias
            if cell == "clipped_relu":
                rounded_limit(meta["limit"], weights.dtype)
                layer.limit = float(meta["limit"])
        except KeyError as error:
            raise ValueError(f"{source}: has no {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {error}") from error
        return layer

    # ---- parts -----------------------------------------------------------------------------------

    def _check(self, x: Any) -> Facts:
        library("x_projected", x)
        return input_facts(self.weights, _plain(x))

    def _resets(self, resets: Any, known: Facts) -> Any:
        """Resets in the operator's form."""
        if resets is None:
            return None
        found, wanted = arrays.facts("resets", resets), known.shape[:2]
        if found.shape != wanted or not found.dtype.startswith(("bool", "int", "uint")):
            raise ValueError(
                f"resets: expected shape {wanted} (steps, batch) of bool or integers, got {found.shape} and"
                f" {found.dtype}"
            )
        check_device("resets", found, known, "x_projected is")
        if found.dtype == "int32":
            return resets
        return library("resets", resets).cast(resets if found.dtype == "bool" else resets != 0, "int32")

    def _left(self, lengths: Any, time: slice) -> Any:
        """The part of the lengths within the steps of a launch."""
        xp = library("lengths", lengths)
        left = xp.above_zero(lengths - time.start)
        most = xp.full((1,), time.stop - time.start, "int32", lengths)
        return xp.where(left < most, left, most)

    def _zeros(self, x: Any) -> Any:
        shape = (x.shape[1], self.hidden)
        make = library("x_projected", x).full
        return kept(self._constants, ("zeros", x.shape[1], *_place(x)), lambda: make(shape, 0.0, self.dtype, x))

    def _placed(self, name: str, array: np.ndarray, like: Any) -> Any:
        make = library("x_projected", like).from_host
        return kept(self._constants, (name, *_place(like)), lambda: make(array, like))


class SparseRNN(_Layer):
    """An Elman layer with sparse recurrent weights.

        h_t = g(x_t + W_hh h_{t-1}),  g = tanh, relu, or min(relu(x), limit)

    Parameters
    ----------
    weight_hh
        `(hidden, hidden)`: a SciPy sparse matrix, a torch tensor of a sparse layout, a dense NumPy array or torch
        tensor (whose nonzeros are used), or a `RecurrentWeights` or `BlockRecurrentWeights`.
    nonlinearity
        "tanh", "relu" or "clipped_relu".
    limit
        A number above 0, for "clipped_relu" alone.
    density
        Prune a dense weight to this share of its entries first.
    method, block
        Pruning method and block size, as in `tvm_sparse.pruning_mask`; blocks contain rows of all gates.
    dtype
        Dtype of weights, inputs, states and outputs: "float32", "float16" or "bfloat16"; default: that of the weight
        (float32 instead of float64). Sums are accumulated in float32; states are rounded after each step.
    form
        "entries": every nonzero with its column, for any pattern. "blocks": tiles of 16 rows (4 units of a GRU or LSTM)
        and groups of 8 columns for tensor cores, for block-sparse and dense weights. "auto": blocks if values have 16
        bits and more than half of the values in the blocks are nonzero, or more than 15 % if blocks take at most 8 MiB;
        else entries.
    order
        Order of the entries of a row: "banks" (few bank conflicts), "greedy" or "columns", as in
        `formats.recurrent.recurrent_weights`.
    device
        Device for `capture`, e.g. "cuda". Calls run on the device of their inputs.

    Attributes
    ----------
    weights
        The `RecurrentWeights` or `BlockRecurrentWeights`.

    Raises
    ------
    TypeError, ValueError
        For parameters that do not fit, naming them.

    Notes
    -----
    Results have the gradients of x_projected and of the states; weights and the bias of a GRU are constants. A
    `RecurrentStack` trains them, too (`RecurrentStack.trainable`). If the weights change, make a new layer.

    Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip", equation 2.
    """

    cells = NONLINEARITIES

    def __init__(
        self,
        weight_hh: Any,
        *,
        nonlinearity: str = "tanh",
        limit: float | None = None,
        density: float | None = None,
        method: str = "magnitude",
        block: int = BLOCK,
        dtype: str | None = None,
        form: str = "auto",
        order: str = "banks",
        device: Any = None,
    ) -> None:
        if nonlinearity not in NONLINEARITIES:
            raise ValueError(f"nonlinearity: expected one of {', '.join(NONLINEARITIES)}, got {nonlinearity!r}")
        if (limit is None) == (nonlinearity == "clipped_relu"):
            wanted = "a number above 0" if limit is None else "None"
            raise ValueError(f"limit: expected {wanted} for nonlinearity={nonlinearity!r}, got {limit!r}")
        super().__init__(weight_hh, nonlinearity, density, method, block, dtype, form, order, device)
        if limit is not None:
            rounded_limit(limit, self.dtype)
            self.limit = float(limit)

    def __call__(
        self, x_projected: Any, h0: Any = None, *, resets: Any = None, lengths: Any = None, out: Any = None
    ) -> tuple[Any, Any]:
        """Run the layer over all steps.

        Parameters
        ----------
        x_projected
            `(steps, batch, hidden)` torch tensor or NumPy array of the layer's dtype: W_ih x_t + b_ih + b_hh, see
            `project_inputs`. Batches above 16 take several launches.
        h0
            `(batch, hidden)`, the state before the first step; default: zeros.
        resets
            `(steps, batch)` of bool or integers: where it is nonzero, the state is set to zero before that step.
        lengths
            `(batch,)` integers in [0, steps]: after a sequence's end its output is 0, and its state does not change.
            Checked if they are on the host.
        out
            The arrays to write into, in the order of the results.

        Returns
        -------
        output
            `(steps, batch, hidden)` of the layer's dtype: h_t.
        h_n
            `(batch, hidden)`: the state after the last step of each sequence; `h0` for length 0.

        Raises
        ------
        TypeError, ValueError
            For arguments that do not fit, naming them.
        RuntimeError
            If a gradient is wanted and there is `out`.
        """
        output, h_n = self._call(x_projected, (h0,), resets, lengths, out)
        return output, h_n


class SparseLSTM(_Layer):
    """A long short-term memory layer with sparse recurrent weights.

        i, f, o = sigmoid(x_{i,f,o} + W_{i,f,o} h_{t-1}),  g = tanh(x_g + W_g h_{t-1})
        c_t = f c_{t-1} + i g,  h_t = o tanh(c_t)

    Parameters
    ----------
    weight_hh
        `(4 * hidden, hidden)`, gates in torch's order (i, f, g, o); otherwise as in `SparseRNN`.
    density, method, block, dtype, form, order, device
        As in `SparseRNN`. c is kept in float32 within a launch.

    Raises
    ------
    TypeError, ValueError
        For parameters that do not fit, naming them.

    Notes
    -----
    Gradients: as for `SparseRNN`.

    Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs", appendix B.
    """

    cells = ("lstm",)

    def __init__(
        self,
        weight_hh: Any,
        *,
        density: float | None = None,
        method: str = "magnitude",
        block: int = BLOCK,
        dtype: str | None = None,
        form: str = "auto",
        order: str = "banks",
        device: Any = None,
    ) -> None:
        super().__init__(weight_hh, "lstm", density, method, block, dtype, form, order, device)

    def __call__(
        self,
        x_projected: Any,
        h0: Any = None,
        c0: Any = None,
        *,
        resets: Any = None,
        lengths: Any = None,
        out: Any = None,
    ) -> tuple[Any, Any, Any]:
        """Run the layer over all steps, as `SparseRNN` does.

        Parameters
        ----------
        x_projected
            `(steps, batch, 4 * hidden)`.
        h0, c0
            `(batch, hidden)`; default: zeros.
        resets, lengths, out
            As in `SparseRNN`; resets also set c to zero.

        Returns
        -------
        output, h_n, c_n
            `(steps, batch, hidden)`, `(batch, hidden)` and `(batch, hidden)`.
        """
        output, h_n, c_n = self._call(x_projected, (h0, c0), resets, lengths, out)
        return output, h_n, c_n


class SparseGRU(_Layer):
    """A gated recurrent unit layer with sparse recurrent weights.

        r, z = sigmoid(x_{r,z} + W_{r,z} h_{t-1}),  n = tanh(x_n + r (W_n h_{t-1} + b_hn))
        h_t = (1 - z) n + z h_{t-1};  with the reset before the product n = tanh(x_n + W_n (r h_{t-1}))

    Parameters
    ----------
    weight_hh
        `(3 * hidden, hidden)`, gates in torch's order (r, z, n); otherwise as in `SparseRNN`.
    hidden_bias
        `(hidden,)`: b_hn, the last third of torch's `bias_hh`, which a projection cannot include; default: zeros. If a
        `(3 * hidden,)` bias is given, its last third is used. None if not `reset_after`: `project_inputs` then includes
        all biases.
    reset_after
        Whether the reset gate scales the product, as in `torch.nn.GRU`, or, before it, the state: Keras's argument of
        this name, and ONNX's `linear_before_reset`. Both have their gates in the order z, r, n. With a reset before the
        product a step takes about twice as long on a GPU.
    density, method, block, dtype, form, order, device
        As in `SparseRNN`.

    Raises
    ------
    TypeError, ValueError
        For parameters that do not fit, naming them.

    Notes
    -----
    Gradients: as for `SparseRNN`.

    Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs", with the cell of `torch.nn.GRU`.
    """

    cells = ("gru", "gru_reset_before")

    def __init__(
        self,
        weight_hh: Any,
        hidden_bias: Any = None,
        *,
        reset_after: bool = True,
        density: float | None = None,
        method: str = "magnitude",
        block: int = BLOCK,
        dtype: str | None = None,
        form: str = "auto",
        order: str = "banks",
        device: Any = None,
    ) -> None:
        if not reset_after and hidden_bias is not None:
            raise ValueError("hidden_bias: expected None with reset_after=False; project_inputs includes all biases")
        cell = "gru" if reset_after else "gru_reset_before"
        super().__init__(weight_hh, cell, density, method, block, dtype, form, order, device)
        if not reset_after:
            return
        if hidden_bias is None:
            self.hidden_bias = np.zeros(self.hidden, numpy_dtype(self.dtype))
            return
        library("hidden_bias", hidden_bias)
        given = to_host(hidden_bias)
        if given.shape not in ((self.hidden,), (3 * self.hidden,)):
            raise ValueError(
                f"hidden_bias: expected shape ({self.hidden},), or ({3 * self.hidden},) of all gates, got {given.shape}"
            )
        self.hidden_bias = np.array(given[-self.hidden :], numpy_dtype(self.dtype))

    def __call__(
        self, x_projected: Any, h0: Any = None, *, resets: Any = None, lengths: Any = None, out: Any = None
    ) -> tuple[Any, Any]:
        """Run the layer over all steps, as `SparseRNN` does, with `x_projected` `(steps, batch, 3 * hidden)`."""
        output, h_n = self._call(x_projected, (h0,), resets, lengths, out)
        return output, h_n


def checked_lengths(lengths: Any, x: Any, steps: int, batch: int, name: str = "x_projected") -> Any:
    """Lengths in the operator's form, int32 on the device of x (the caller's argument `name`); those on the host are
    checked.

    Raises
    ------
    ValueError
        For another shape, dtype or device, and for values outside of [0, steps].
    """
    if lengths is None:
        return None
    if not arrays.is_torch(lengths):
        lengths = np.asarray(lengths)
    found, beside = arrays.facts("lengths", lengths), arrays.facts(name, x)
    if found.shape != (batch,) or not found.dtype.startswith(("int", "uint")):
        raise ValueError(f"lengths: expected shape ({batch},) (batch) of integers, got {found.shape} and {found.dtype}")
    if found.device != "cpu":
        if (found.device, found.index) != (beside.device, beside.index):
            raise ValueError(f"lengths: expected an array on the host or beside {name}, got {lengths.device}")
        return lengths if found.dtype == "int32" else TORCH.cast(lengths, "int32")
    lengths = to_host(lengths)
    outside = np.flatnonzero((lengths < 0) | (lengths > steps))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"lengths: expected values in [0, {steps}] (steps), got {lengths[at]} at {at}")
    return library(name, x).from_host(lengths.astype(np.int32), x)


def _gates_of(weight_hh: Any, cell: str) -> int:
    """Number of gates of a weight to be pruned, if its rows match; otherwise it is refused later."""
    return GATES[cell] if len(weight_hh.shape) and not weight_hh.shape[0] % GATES[cell] else 1


def _plain(array: Any) -> Any:
    """A tensor without its gradient, for checks; anything else unchanged."""
    return array.detach() if arrays.is_torch(array) else array


def _is_dense(array: Any) -> bool:
    import torch

    return array.layout is torch.strided


def _place(array: Any) -> tuple[str, Any]:
    """Library and device, as a key."""
    return ("torch", array.device) if arrays.is_torch(array) else ("numpy", None)

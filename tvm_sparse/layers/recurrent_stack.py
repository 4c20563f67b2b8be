"""Stacks of recurrent layers and directions that replace `torch.nn.RNN`, `LSTM` and `GRU`, which need PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..core import machine
from ..core.problem import FLOATS
from ..operators.sparse_recurrent.call import with_gradient
from ..operators.sparse_recurrent.problem import GATES
from ..runtime import arrays
from ..runtime.calls import machine_of
from ..runtime.dense import DENSE, KERNEL, Likely
from . import storage
from .libraries import tensor, to_host
from .modules import DTYPES, check_conversion, effective, refuse_own_forward
from .pruning import BLOCK
from .recurrent import FORMAT, LayerExplanation, SparseGRU, SparseLSTM, SparseRNN, checked_lengths, projected_bias
from .recurrent_dense import DenseCall, flat_weights, inexpressible, likely_way, projected_weights, run_dense
from .recurrent_projected import ProjectedLSTM
from .recurrent_weights import with_values

CELLS = {"RNN_TANH": "tanh", "RNN_RELU": "relu", "LSTM": "lstm", "GRU": "gru"}  # by `torch.nn.RNNBase.mode`
LAYERS = SparseRNN, SparseLSTM, SparseGRU
CLASSES: dict[str, Any] = {cell: layer for layer in LAYERS for cell in layer.cells}
# The classes of PyTorch that a stack can replace.
MODULES: dict[str, Any] = {
    "RNN_TANH": torch.nn.RNN,
    "RNN_RELU": torch.nn.RNN,
    "LSTM": torch.nn.LSTM,
    "GRU": torch.nn.GRU,
}


def from_torch(
    module: torch.nn.RNNBase,
    *,
    density: float | None = None,
    method: str = "magnitude",
    block: int = BLOCK,
    dtype: str | None = None,
    form: str = "auto",
    order: str = "banks",
    dense: bool | None = None,
) -> RecurrentStack:
    """Convert a trained `torch.nn.RNN`, `LSTM` or `GRU` to sparse layers, which replace `module.eval()`.

    Parameters
    ----------
    module
        A module with any number of layers, directions, `batch_first` and biases. It is copied; later changes of it have
        no effect. There is no dropout, as in evaluation. If its weights are pruned by `torch.nn.utils.prune`,
        parametrized or normalised, the present effective weights are used.
    density
        Prune each recurrent weight to this share of its entries; None: keep its nonzeros, as after `GradualPruning`.
        Input weights stay dense.
    method, block
        As in `tvm_sparse.pruning_mask`.
    dtype
        "float32", "float16" or "bfloat16"; default: that of the module, which must be one of them.
    form, order
        As in `SparseRNN`.
    dense
        As in `RecurrentStack`.

    Raises
    ------
    TypeError
        If it is not such a module, or is a subclass with another `forward`.
    ValueError
        For float64 without `dtype`, and for arguments that do not fit.

    Notes
    -----
    An LSTM with `proj_size` computes gates from W_hh W_hr m[t-1], with m the states before their projection: the
    product of both weights, *folded*, takes the place of W_hh in the kernels, and is dense whatever `density` is. It
    has 4 * hidden^2 values, where the two weights have 5 * proj_size * hidden. On a GPU in 16 bits, up to 1,024 units,
    it stays on the chip, and a step has one exchange between units instead of two. Otherwise calls without `lengths`
    and `resets` run PyTorch's own layer, which multiplies by fewer values; `dense=False` refuses that.
    """
    if not isinstance(module, torch.nn.RNNBase):
        raise TypeError(f"module: expected a torch.nn.RNN, LSTM or GRU, got {type(module).__name__}")
    cell = CELLS[module.mode]
    instead = "make SparseRNN, SparseLSTM or SparseGRU layers of its weights, and call them as it does"
    refuse_own_forward("module", module, MODULES[module.mode], instead=instead)
    if dtype is None:
        own = effective(module, "weight_hh_l0")
        assert own is not None
        if own.dtype not in DTYPES:
            raise ValueError(
                f"module: is of {own.dtype}, and stacks compute in {', '.join(FLOATS)}; pass dtype='float32' to round"
                " its weights"
            )
        dtype = DTYPES[own.dtype]
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES.values())}, got {dtype!r}")
    kind, layers, inputs = getattr(torch, dtype), [], []
    options: dict[str, Any] = {
        "density": density, "method": method, "block": block, "dtype": dtype, "form": form,
        "order": order,
    }  # fmt: skip
    for number in range(module.num_layers):
        for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            found = [effective(module, f"{name}_l{number}{suffix}") for name in names]
            weight_ih, weight_hh, bias_ih, bias_hh = found
            assert weight_ih is not None and weight_hh is not None
            given = dict(options)
            if cell == "gru":
                given["hidden_bias"] = bias_hh
            elif cell != "lstm":
                given["nonlinearity"] = cell
            if module.proj_size:
                del given["form"]
                projection = effective(module, f"weight_hr_l{number}{suffix}")
                assert projection is not None
                layers.append(ProjectedLSTM(weight_hh, projection, **given))
            else:
                layers.append(CLASSES[cell](weight_hh, **given))
            bias = projected_bias(bias_ih, bias_hh, cell)
            inputs.append((weight_ih.to(kind, copy=True), None if bias is None else bias.to(kind, copy=True)))
    shape = {"bidirectional": module.bidirectional, "batch_first": module.batch_first}
    return RecurrentStack(layers, inputs, **shape, dense=dense)


class RecurrentStack(torch.nn.Module):
    """Stacked recurrent layers in one or both directions, with the interface of `torch.nn.RNN`, `LSTM` and `GRU`.

    Use `from_torch` or `load` to make one. It is a module without parameters: `to`, `half` and similar methods convert
    it, and `save` writes it to a file. Its state dict has the input weights and, as one tensor of bytes, the recurrent
    ones; a stack of the same cell, sizes and layers can load it, whatever its pruning.

    Results have the gradients of input and states. `trainable` makes parameters of the weights: the stack is then
    trained with the pattern that it has.

    Under `torch.autocast` it runs in the dtype of autocast, like PyTorch's modules, with weights rounded to it at the
    first such call and cached; inputs of any dtype are cast. Otherwise inputs must have the stack's dtype. Conversions
    without a kernel, such as `double()`, raise a TypeError and change nothing. `torch.jit.trace` is refused.

    Parameters
    ----------
    layers
        `SparseRNN`, `SparseLSTM` or `SparseGRU` of one kind and size: layer by layer, each with the forward direction
        before the backward one.
    inputs
        For each of them the weight `(gates * hidden, input)` and the bias `(gates * hidden,)`, or None, of its
        projection.
    bidirectional, batch_first
        As in `torch.nn.LSTM`.
    dense
        Whether calls run PyTorch's own layer (cuDNN on a GPU) with a dense copy of the weights, whose gradient is taken
        at the pattern. None: where that is likely to be faster, which `explain` tells; False: never; True: wherever
        PyTorch's layer can compute the call: without `lengths` (a `PackedSequence` has them) and without `resets`. The
        copy takes 2 * gates * hidden * (input + hidden) bytes a layer in 16 bits. It multiplies zeros too: a NaN or an
        infinity in a state reaches all units. An attribute, which may be set later, and which files do not hold.

    Raises
    ------
    TypeError, ValueError
        For layers and weights that do not fit each other, naming them.
    """

    weight_0: torch.Tensor

    def __init__(
        self,
        layers: Sequence[Any],
        inputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        *,
        bidirectional: bool = False,
        batch_first: bool = False,
        dense: bool | None = None,
    ) -> None:
        super().__init__()
        directions = 2 if bidirectional else 1
        if not isinstance(layers, (list, tuple)) or not all(isinstance(layer, LAYERS) for layer in layers):
            raise TypeError(
                "layers: expected a list of SparseRNN, SparseLSTM or SparseGRU, got"
                f" {type(layers).__name__}; RecurrentStack.load reads a file, tvm_sparse.from_torch converts a module"
            )
        if not layers or len(layers) % directions or len(inputs) != len(layers):
            raise ValueError(
                f"layers: expected as many as inputs, a multiple of {directions} above 0, got {len(layers)}, and"
                f" {len(inputs)} inputs"
            )
        kinds = {(layer.cell, layer.hidden, layer.dtype, _proj(layer)) for layer in layers}
        if len(kinds) > 1:
            raise ValueError(f"layers: expected one cell, hidden size, dtype and proj_size, got {sorted(kinds)}")
        [(self.cell, self.hidden_size, self.dtype, self.proj_size)] = kinds
        width = directions * (self.proj_size or self.hidden_size)
        rows = GATES[self.cell] * self.hidden_size
        self.input_size = inputs[0][0].shape[1]
        for number, (weight, bias) in enumerate(inputs):
            wanted = (rows, self.input_size if number < directions else width)
            if tuple(weight.shape) != wanted or bias is not None and tuple(bias.shape) != (rows,):
                raise ValueError(
                    f"inputs: expected a weight of shape {wanted} and a bias of ({rows},) at {number}, got"
                    f" {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
                )
            self.register_buffer(f"weight_{number}", weight)
            self.register_buffer(f"bias_{number}", bias)
        self.layers = list(layers)
        self._cast: tuple[list[Any], dict[str, list[Any]]] | None = None
        self._flat: dict[tuple[int, torch.dtype], tuple[tuple[Any, ...], list[torch.Tensor]]] = {}
        self.trained, self.dense = False, dense
        self.bidirectional, self.batch_first = bool(bidirectional), bool(batch_first)
        self.num_layers = len(layers) // directions
        self.eval()

    def trainable(self) -> RecurrentStack:
        """Make parameters of the weights, to train the stack with the pattern that it has; returns the stack.

        For layer n (of the first direction, then of the second) these are `weight_n` and `bias_n` of the projection,
        `values_n` `(nonzeros,)`, the stored recurrent weights in the order of `layers[n].weights.coordinates()`, of a
        GRU `hidden_bias_n` `(hidden,)`, and with `proj_size` `projection_n` `(proj_size, hidden)`. A backward pass
        takes 4 * gates * hidden^2 bytes beside activations, or 2 with 16 bits. `save` and the state dict hold the
        present values.
        """
        if self.trained:
            return self
        for number, layer in enumerate(self.layers):
            own = getattr(self, f"weight_{number}")
            held = {"values": layer.weights.coordinates()[2], "hidden_bias": layer.hidden_bias}
            held |= {"projection": layer.projection} if self.proj_size else {}
            given = {name: None if a is None else tensor(a, own.device).to(own.dtype) for name, a in held.items()}
            given |= {name: self._buffers.pop(f"{name}_{number}") for name in ("weight", "bias")}
            for name, value in given.items():
                made = None if value is None else torch.nn.Parameter(value.detach().clone())
                self.register_parameter(f"{name}_{number}", made)
        self.trained = True
        return self.train()

    def frozen(self) -> RecurrentStack:
        """A stack of the present weights, without parameters, for evaluation."""
        inputs = [(getattr(self, f"weight_{n}"), getattr(self, f"bias_{n}")) for n in range(len(self.layers))]
        copied = [tuple(None if one is None else one.detach().clone() for one in pair) for pair in inputs]
        options = {"bidirectional": self.bidirectional, "batch_first": self.batch_first, "dense": self.dense}
        return RecurrentStack(self._present(), copied, **options)  # type: ignore[arg-type]

    def _present(self) -> list[Any]:
        """The layers with the present values of parameters."""
        if not self.trained:
            return self.layers
        found = []
        for number, layer in enumerate(self.layers):
            values, bias = getattr(self, f"values_{number}"), getattr(self, f"hidden_bias_{number}")
            weights = with_values(layer.weights, to_host(values))
            if self.proj_size:
                one = layer._like(weights, layer.device, to_host(getattr(self, f"projection_{number}")))
            else:
                one = layer._like(weights, layer.device)
            if bias is not None:
                one.hidden_bias = to_host(bias)
            found.append(one)
        return found

    @property
    def directions(self) -> int:
        """2 for a bidirectional stack, else 1."""
        return 2 if self.bidirectional else 1

    def extra_repr(self) -> str:
        density = sum(layer.density for layer in self.layers) / len(self.layers)
        projected = f" proj_size={self.proj_size}," if self.proj_size else ""
        return (
            f"{self.input_size}, {self.hidden_size}, cell={self.cell!r},{projected} num_layers={self.num_layers},"
            f" bidirectional={self.bidirectional}, batch_first={self.batch_first}, density={density:.3g},"
            f" dtype={self.dtype}"
        )

    # What a traced forward kept (weights of a dtype, zeros) would belong to a graph.
    @torch.compiler.disable
    def forward(self, input: Any, hx: Any = None, *, lengths: Any = None, resets: Any = None) -> tuple[Any, Any]:
        """As in `torch.nn.LSTM` (`RNN`, `GRU`), with two more arguments.

        Parameters
        ----------
        input
            `(steps, batch, input)`, `(batch, steps, input)` with `batch_first`, `(steps, input)` for one sequence, or a
            `PackedSequence`.
        hx
            `(layers * directions, batch, hidden)`, for an LSTM a pair of them; None: zeros. With `proj_size` the first
            one has as many elements instead of `hidden`, and `output` too.
        lengths
            `(batch,)` integers, instead of a `PackedSequence`. Outputs after a sequence's end are 0.
        resets
            `(steps, batch)` (with `batch_first` `(batch, steps)`) of bool or integers: where it is nonzero, a new
            sequence starts at that step, in both directions.

        Returns
        -------
        output
            Like `input`, with `directions * hidden` features.
        h_n
            Like `hx`.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As in the layers.
        """
        if torch.jit.is_tracing():
            raise RuntimeError(
                "RecurrentStack: torch.jit.trace does not see what its kernels compute; call it outside of the trace"
            )
        if isinstance(input, PackedSequence):
            if lengths is not None or resets is not None:
                raise ValueError("lengths, resets: a PackedSequence has its own lengths, and no resets")
            self._check_width(input.data)
            self._check_shapes(hx, (int(input.batch_sizes[0]),))
            return self._packed(input, hx)
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input: expected a torch tensor or a PackedSequence, got {type(input).__name__}")
        self._check_width(input)
        single, swapped = input.dim() == 2, self.batch_first and input.dim() == 3
        self._check_shapes(hx, () if single else (input.shape[0 if swapped else 1],))
        self._check_resets(resets, input)
        if single:
            input, resets = input[:, None], None if resets is None else resets[:, None]
            hx = _mapped(hx, lambda state: state[:, None])
        elif swapped:
            input, resets = input.transpose(0, 1), None if resets is None else resets.transpose(0, 1)
        output, states = self._run(input, hx, lengths, resets)
        if single:
            return output[:, 0], _mapped(states, lambda state: state[:, 0])
        return (output.transpose(0, 1) if swapped else output), states

    def _packed(self, input: PackedSequence, hx: Any) -> tuple[Any, Any]:
        data, lengths = pad_packed_sequence(PackedSequence(input.data, input.batch_sizes))
        if input.sorted_indices is not None:
            order = input.sorted_indices
            hx = _mapped(hx, lambda state: state.index_select(1, order))
        output, states = self._run(data, hx, lengths, None)
        if input.unsorted_indices is not None:
            back = input.unsorted_indices
            states = _mapped(states, lambda state: state.index_select(1, back))
        packed = pack_padded_sequence(output, lengths)
        return PackedSequence(packed.data, input.batch_sizes, input.sorted_indices, input.unsorted_indices), states

    def _run(self, x: Any, hx: Any, lengths: Any, resets: Any) -> tuple[Any, Any]:
        """Run all layers on `(steps, batch, input)`."""
        dtype = self._check_input(x)
        steps, batch, _ = x.shape
        lstm = self.cell == "lstm"
        given = (None,) * (1 + lstm) if hx is None else tuple(hx) if lstm else (hx,)
        given = tuple(None if state is None else self._checked_state(state, x, dtype) for state in given)
        x, layers = x.to(dtype), self._layers_in(DTYPES[dtype])
        lengths = checked_lengths(lengths, x, steps, batch, "input")
        turned = _Turned(lengths, resets, steps, x.device) if self.bidirectional else None
        last: list[list[Any]] = [[] for _ in given]
        for number in range(self.num_layers):
            outputs = []
            for direction in range(self.directions):
                place = number * self.directions + direction
                begin = tuple(None if state is None else state[place] for state in given)
                trained = {}
                if self.trained:
                    names = ("values", "hidden_bias", *(("projection",) if self.proj_size else ()))
                    own = {name: getattr(self, f"{name}_{place}") for name in names}
                    trained = {name: None if one is None else one.to(dtype) for name, one in own.items()}
                if self._takes_dense(place, x, lengths is not None, resets is not None):
                    flat = self._flat_weights(place, layers[place], dtype, trained)
                    source = turned.turn(x) if direction and turned else x
                    gradient = with_gradient(x, *begin, *flat)
                    output, *ends = run_dense(self.cell, source, begin, flat, gradient)
                else:
                    weight, bias = getattr(self, f"weight_{place}"), getattr(self, f"bias_{place}")
                    projected, begins = torch.nn.functional.linear(x, weight, bias), resets
                    if direction and turned:
                        projected, begins = turned.turn(projected), turned.resets
                    output, *ends = layers[place]._call(projected, begin, begins, lengths, None, **trained)
                outputs.append(turned.turn(output) if direction and turned else output)
                for kept, state in zip(last, ends, strict=True):
                    kept.append(state)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        states = [torch.stack(kept) for kept in last]
        return x, (tuple(states) if lstm else states[0])

    def _dense_call(self, place: int, batch: int, dtype: str, ragged: bool, resets: bool) -> DenseCall:
        inputs, density = getattr(self, f"weight_{place}").shape[1], self.layers[place].density
        return DenseCall(self.cell, self.hidden_size, inputs, batch, density, dtype, ragged, resets, self.proj_size)

    def _takes_dense(self, place: int, x: torch.Tensor, ragged: bool, resets: bool) -> bool:
        """Whether a layer's call runs PyTorch's own layer."""
        if self.dense is False or 0 in x.shape[:2]:
            return False
        call = self._dense_call(place, x.shape[1], DTYPES[x.dtype], ragged, resets)
        if self.dense:
            return inexpressible(call) is None
        # In a graph of torch.compile, PyTorch's layer is no operator.
        if torch.compiler.is_compiling() or not (torch.cudnn_is_acceptable(x) if x.is_cuda else self.proj_size):
            return False
        return likely_way(call, machine_of("input", arrays.facts("input", x))).way == DENSE

    def _flat_weights(self, place: int, layer: Any, dtype: torch.dtype, trained: dict[str, Any]) -> list[torch.Tensor]:
        """A layer's weights for the dense way: kept from call to call, unless they are parameters."""
        weight, bias = getattr(self, f"weight_{place}"), getattr(self, f"bias_{place}")

        def made() -> list[torch.Tensor]:
            inside = trained.get("hidden_bias")
            if inside is None and layer.hidden_bias is not None:
                inside = tensor(layer.hidden_bias, weight.device)
            own = weight.to(dtype), None if bias is None else bias.to(dtype), inside
            if self.proj_size:
                return projected_weights(layer, trained.get("values"), trained.get("projection"), *own[:2])
            return flat_weights(layer.weights, trained.get("values"), *own)

        tensors = [one for one in (weight, bias) if one is not None]
        if trained or any(one.is_inference() or one.requires_grad for one in tensors):
            return made()
        state = (layer.weights, *((one, one._version) for one in tensors))
        kept = self._flat.get((place, dtype))
        if kept is None or not _same(kept[0], state):
            # No tensors of inference mode, which later calls could not keep for a backward pass.
            with torch.inference_mode(False), torch.no_grad():
                kept = self._flat[place, dtype] = state, made()
        return kept[1]

    def explain(
        self, steps: int, batch: int, *, resets: bool = False, lengths: bool = False, target: str = "auto"
    ) -> tuple[LayerExplanation, ...]:
        """For each layer and direction the way of a call with `(steps, batch, input)`, and kernels of the sparse way.

        Parameters are those of the layers' `explain`. Layers run in the stack's dtype; under autocast, in another one,
        they may take the other way.
        """
        where, found = machine.resolve(target), []
        for place, layer in enumerate(self.layers):
            call = self._dense_call(place, batch, self.dtype, lengths, resets)
            likely = likely_way(call, where)
            if self.dense is not None:
                why = inexpressible(call)
                asked = self.dense and why is None
                likely = Likely(DENSE if asked else KERNEL, why if self.dense and why else f"dense={self.dense}")
            what = "PyTorch's layer with dense weights" if likely.way == DENSE else "the sparse layer"
            if likely.way == DENSE and self.proj_size:  # a large folded weight is not made to be explained
                kernels = LayerExplanation((), ())
            else:
                kernels = layer.explain(steps, batch, resets=resets, lengths=lengths, target=target)
            found.append(dataclasses.replace(kernels, way=f"{what}: {likely.why}"))
        return tuple(found)

    def _check_width(self, input: torch.Tensor) -> None:
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"input: expected two or three dimensions, the last of {self.input_size}, got {tuple(input.shape)}"
            )

    def _check_shapes(self, hx: Any, batch: tuple[int, ...]) -> None:
        """Check the number and shapes of states, in terms of the caller's dimensions."""
        if hx is None:
            return
        lstm, wanted = self.cell == "lstm", (len(self.layers), *batch, self.hidden_size)
        each = ((*wanted[:-1], self.proj_size or self.hidden_size), wanted)
        many = "two tensors" if lstm else "one tensor"
        several = isinstance(hx, (tuple, list))
        given = tuple(hx) if several else (hx,)
        shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in given]
        fits = [one is None or shape == of for one, shape, of in zip(given, shapes, each, strict=False)]
        if several != lstm or len(given) != 1 + lstm or not all(fits):
            kinds = ("None" if one is None else type(one).__name__ for one in given)
            got = ", ".join(str(shape or kind) for shape, kind in zip(shapes, kinds, strict=True))
            shape = f"shapes {each[0]} and {wanted}" if self.proj_size else f"shape {wanted}"
            raise ValueError(f"hx: expected {many} of {shape}, got {'' if several else 'one of '}{got}")

    def _check_input(self, x: torch.Tensor) -> torch.dtype:
        """Check the input's dtype and device; return the dtype in which to run."""
        own = self.weight_0
        if own.is_meta:
            raise ValueError("input: the stack is on the meta device, and has no weights; load them on a device first")
        if x.device != own.device:
            raise ValueError(
                f"input: expected a tensor on {own.device}, as the weights of the stack are, got {x.device}; use"
                f" input.to({str(own.device)!r}), or stack.to({str(x.device)!r})"
            )
        if torch.is_autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        if x.dtype is not own.dtype:
            raise ValueError(
                f"input: expected dtype {own.dtype}, as the stack has, got {x.dtype}; use input.to({own.dtype}),"
                " convert the stack, or call it under torch.autocast"
            )
        return own.dtype

    def _checked_state(self, state: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A state of `hx` in the dtype in which the stack runs."""
        if state.device != x.device:
            raise ValueError(f"hx: expected tensors on {x.device}, as input is, got {state.device}")
        if state.dtype is not dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"hx: expected dtype {dtype}, as input has, got {state.dtype}; use .to({dtype})")
        return state.to(dtype)

    def _check_resets(self, resets: Any, input: torch.Tensor) -> None:
        """Check resets in terms of the caller's dimensions."""
        if resets is None:
            return
        if not isinstance(resets, torch.Tensor):
            raise TypeError(f"resets: expected a torch tensor, got {type(resets).__name__}")
        wanted = tuple(input.shape[:-1])
        if tuple(resets.shape) != wanted or resets.is_floating_point() or resets.is_complex():
            raise ValueError(
                f"resets: expected shape {wanted}, as input has, of bool or integers, got {tuple(resets.shape)} of"
                f" {resets.dtype}"
            )
        if resets.device != input.device:
            raise ValueError(f"resets: expected a tensor on {input.device}, as input is, got {resets.device}")

    def _layers_in(self, dtype: str) -> list[Any]:
        """The layers in a dtype: the stack's own, or, under autocast, copies that are kept as long as these."""
        if dtype == self.dtype:
            return self.layers
        if self._cast is None or self._cast[0] is not self.layers:
            self._cast = self.layers, {}
        if dtype not in self._cast[1]:
            self._cast[1][dtype] = [layer.astype(dtype) for layer in self.layers]
        return self._cast[1][dtype]

    # ---- life ------------------------------------------------------------------------------------

    def flatten_parameters(self) -> None:
        """Does nothing; for models that call it, as for `torch.nn.LSTM`."""

    def _apply(self, fn: Any, recurse: bool = True) -> RecurrentStack:
        check_conversion(self, fn)
        super()._apply(fn, recurse)
        dtype = DTYPES[self.weight_0.dtype]
        if dtype != self.dtype:
            self.layers, self.dtype = [layer.astype(dtype) for layer in self.layers], dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cast": None, "_flat": {}}  # made again when needed

    def get_extra_state(self) -> torch.Tensor:
        """The recurrent weights as bytes, which the state dict has beside the buffers."""
        held: dict[str, Any] = {}
        metas = []
        for number, layer in enumerate(self._present()):
            arrays, meta = layer.parts()
            held |= {f"{name}_{number}": array for name, array in arrays.items()}
            metas.append(meta)
        return torch.frombuffer(bytearray(storage.to_bytes(held, {"layers": metas})), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Load recurrent weights, in the dtype of the stack.

        Raises
        ------
        ValueError
            If they are damaged, or of another cell, size or number of layers.
        """
        held, meta = storage.from_bytes(to_host(state).tobytes(), "state")
        metas = meta.get("layers", [])
        layers = []
        for number, numbers in enumerate(metas):
            own = _of_layer(held, number)
            layers.append(_class_of(self.cell, own).assembled(own, numbers, None, f"state, layer {number}"))
        kinds = {(layer.cell, layer.hidden) for layer in layers}
        projected = {_proj(layer) for layer in layers} != {self.proj_size}
        if len(layers) != len(self.layers) or kinds != {(self.cell, self.hidden_size)} or projected:
            raise ValueError(
                f"state: expected {len(self.layers)} layers of {self.cell} and {self.hidden_size} units, got"
                f" {len(layers)} of {sorted(kinds)}"
            )
        self.layers = [layer.astype(self.dtype) for layer in layers]

    def save(self, path: str | Path) -> Path:
        """Write the stack to a file, as `SparseLSTM.save` does for a layer. Returns the path with its suffix."""
        held: dict[str, Any] = {}
        metas = []
        for number, layer in enumerate(self._present()):
            arrays, meta = layer.parts()
            arrays = {**arrays, "weight_ih": to_host(getattr(self, f"weight_{number}"))}
            bias = getattr(self, f"bias_{number}")
            if bias is not None:
                arrays["bias"] = to_host(bias)
            held |= {f"{name}_{number}": array for name, array in arrays.items()}
            metas.append(meta)
        meta = {
            "format": FORMAT,
            "layers": metas,
            "bidirectional": self.bidirectional,
            "batch_first": self.batch_first,
        }
        return storage.write(Path(path), held, meta)

    @classmethod
    def load(cls, path: str | Path, *, device: Any = None, dense: bool | None = None) -> RecurrentStack:
        """Load a stack written by `save`, on a device (default: the CPU); `dense` as in the class.

        Raises
        ------
        ValueError
            If the file is damaged, of another version, or does not describe a valid stack.
        """
        path = Path(path)
        held, meta = storage.read(path)
        if meta.get("format") != FORMAT or "layers" not in meta:
            raise ValueError(f"{path}: not a stack of format {FORMAT}")
        layers, inputs = [], []
        try:
            for number, numbers in enumerate(meta["layers"]):
                own = _of_layer(held, number)
                kind = _class_of(numbers["cell"], own)
                layers.append(kind.assembled(own, numbers, None, f"{path}, layer {number}"))
                place = "cpu" if device is None else device
                inputs.append((tensor(own["weight_ih"], place), tensor(own["bias"], place) if "bias" in own else None))
            shape = {"bidirectional": meta["bidirectional"], "batch_first": meta["batch_first"]}
            return cls(layers, inputs, **shape, dense=dense)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}: not a stack: {type(error).__name__}: {error}") from error


def _proj(layer: Any) -> int:
    """Elements of a layer's projected states; 0 if they are not projected."""
    return layer.proj if isinstance(layer, ProjectedLSTM) else 0


def _class_of(cell: str, held: dict[str, Any]) -> Any:
    """The class of a layer with these arrays."""
    return ProjectedLSTM if cell == "lstm" and "projection" in held else CLASSES[cell]


def _of_layer(held: dict[str, Any], number: int) -> dict[str, Any]:
    """The arrays of one layer, by its own names for them."""
    ends = f"_{number}"
    return {name.removesuffix(ends): a for name, a in held.items() if name.rpartition("_")[2] == ends[1:]}


class _Turned:
    """Sequences in reverse order, as the input and output of a backward direction."""

    def __init__(self, lengths: Any, resets: Any, steps: int, device: Any) -> None:
        self._places: Any = None
        if lengths is not None:
            # Clamped as in kernels, since lengths on a GPU are not checked.
            count = lengths.long().clamp(0, steps)
            step = torch.arange(steps, device=device)[:, None]
            self._places = torch.where(step < count, count - 1 - step, step)
        self.resets: Any = None
        if resets is not None:
            # A sequence that starts at t ends, in reverse order, between t and t - 1.
            shifted = torch.zeros_like(resets)
            shifted[:-1] = resets[1:]
            if lengths is not None:
                shifted = torch.where(step < count - 1, shifted, torch.zeros_like(shifted))
            self.resets = self.turn(shifted[..., None])[..., 0]

    def turn(self, x: Any) -> Any:
        """`(steps, batch, features)` with the steps of each sequence reversed within its length."""
        if self._places is None:
            return x.flip(0)
        return x.gather(0, self._places[..., None].expand_as(x))


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states of a layer's weights are of the same tensors, unchanged since."""
    (weights, *tensors), (of_other, *others) = one, other
    if weights is not of_other or len(tensors) != len(others):
        return False
    return all(a is b and was == now for (a, was), (b, now) in zip(tensors, others, strict=True))


def _mapped(states: Any, change: Any) -> Any:
    """Apply a function to a state, or to each of a pair; None stays None."""
    if states is None:
        return None
    return tuple(change(state) for state in states) if isinstance(states, (tuple, list)) else change(states)

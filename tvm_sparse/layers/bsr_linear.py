"""A linear layer with a block-sparse weight, and the replacement of a model's linear layers, which need PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.given import block_of
from ..core.machine import gpu
from ..core.problem import FLOATS
from ..operators.bsr_matmul.call import BsrWeight, bsr_matmul, check_precision
from ..operators.bsr_matmul.dense import trains_dense
from ..operators.bsr_matmul.problem import ACTIVATIONS
from ..operators.bsr_matmul.torch_op import (
    Known,
    Trained,
    Turned,
    dense_matrix,
    dense_product,
    distinct_rows,
    product,
    turned,
)
from ..operators.bsr_matmul.weight import Structure, balanced
from ..runtime.arrays import dtype_name
from ..runtime.custom import unseen
from .dense_weight import DenseWeight
from .modules import (
    DTYPES,
    check_conversion,
    effective,
    own_forward,
    parameters_of,
    plain_class,
    refuse_own_forward,
    trained,
)

# Buffers computed from the structure, which are not saved.
_ORDER, _TURNED = "order", ("turned_places", "turned_indices", "turned_indptr", "turned_order")


class Swapped(dict[str, "BsrLinear"]):
    """The result of `sparsify`: the new layers by name.

    Attributes
    ----------
    skipped
        For each linear layer that was not replaced, by name, the reason.
    """

    def __init__(self, layers: Mapping[str, BsrLinear], skipped: Mapping[str, str]) -> None:
        super().__init__(layers)
        self.skipped = dict(skipped)


class BsrLinear(torch.nn.Module):
    """activation(x @ weight.T + bias) with a block-sparse weight: `bsr_matmul` as a module like `torch.nn.Linear`.

    `from_dense` converts a `torch.nn.Linear`, `from_torch` a tensor in BSR format, and `sparsify` all linear layers of
    a model.

    Parameters
    ----------
    weight
        `(out_features, in_features)`: a `BsrWeight` of torch tensors, or an argument for one. Its blocks become a
        parameter.
    bias
        `(out_features,)` tensor of its dtype, on its device, or None.
    activation
        "relu", "gelu", "silu" or None, in the same kernel.
    features
        `(out_features, in_features)` if the weight is padded: blocks then reach beyond the layer's last row or column,
        by less than a block. x is padded with zeros, and rows of the result beyond the last are left out, each a copy.
        None: the weight's shape.
    precision
        As in `bsr_matmul`: `"tf32"` for float32 on tensor cores, also for the gradient of x.

    Attributes
    ----------
    data
        `(nnzb, block_rows, block_cols)` parameter: the stored blocks. It may be trained; the structure stays.
    bias
        `(out_features,)` parameter or None.
    indices, indptr
        int32 buffers: the structure. They are in the state dict with `data` and `bias`; `load_state_dict` also accepts,
        and checks, a state with another structure of a matrix of the same shape.
    weight
        `(out_features, in_features)`: the dense matrix, for code that reads the weight of linear layers, as
        transformers does. Its shape, dtype and device cost nothing; every computation with it makes the dense matrix,
        and gradients flow to the blocks. It is read-only, and not in the state dict.
    in_features, out_features, block_shape, activation, precision
        Properties of the layer, without padding.

    Raises
    ------
    TypeError, ValueError
        As in `BsrWeight`, and for a bias, an activation, features or a precision that do not fit.

    Notes
    -----
    It is differentiable in x, the stored blocks and the bias, like `bsr_matmul`. Under `torch.autocast` x, blocks and
    bias are cast, as in `torch.nn.Linear`. It can be moved and converted (`to`, `half`, ...), copied, pickled, compiled
    (`torch.compile(fullgraph=True)`) and exported (`torch.export`). Conversions without a kernel, such as `double()`,
    raise a TypeError and change nothing.

    When not to use it: with fewer than about half of the blocks zero, a dense layer is as fast. For inference `freeze`
    lets the layer take the dense product where that is likely to be faster. In training on a GPU the layer takes dense
    products, with a copy of the weight in each step, where that is likely to be faster, as with blocks of 16.
    """

    data: Any
    bias: Any
    indices: torch.Tensor
    indptr: torch.Tensor
    order: torch.Tensor
    turned_places: torch.Tensor
    turned_indices: torch.Tensor
    turned_indptr: torch.Tensor
    turned_order: torch.Tensor
    _padded: tuple[int, int]
    _kept: tuple[BsrWeight, Any, tuple[int, int, bool, int]] | None
    _known: Known | None
    _rows: tuple[Any, Any] | None
    precision: str | None = None
    _frozen: bool
    _dense: bool | None
    _structure: int
    _turned_structure: int

    def __init__(
        self,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        activation: str | None = None,
        features: tuple[int, int] | None = None,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(weight, BsrWeight):
            weight = BsrWeight(weight)
        if not isinstance(weight.data, torch.Tensor):
            raise TypeError(f"weight: expected a weight of torch tensors, got one of {type(weight.data).__name__}")
        if activation is not None and activation not in ACTIVATIONS[1:]:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS[1:])} or None, got {activation!r}")
        check_precision(precision)
        self._padded = weight.shape
        own: tuple[int, int] = self._padded if features is None else features
        self.out_features, self.in_features = own
        whole = tuple(-(-size // side) * side for size, side in zip(features or (), weight.block_shape, strict=False))
        if features is not None and whole != weight.shape:
            raise ValueError(f"features: blocks that cover {features} make a weight of {whole}, got {weight.shape}")
        self.block_shape, self.activation, self.precision = weight.block_shape, activation, precision
        self._frozen, self._dense = False, None
        data = weight.data
        if bias is not None:
            wanted = ((self.out_features,), data.dtype, data.device)
            if (tuple(bias.shape), bias.dtype, bias.device) != wanted:
                raise ValueError(
                    f"bias: expected shape {wanted[0]}, dtype {wanted[1]} and device {wanted[2]}, got"
                    f" {tuple(bias.shape)}, {bias.dtype} and {bias.device}"
                )
            bias = torch.nn.Parameter(bias.detach())
        self.data = torch.nn.Parameter(data.detach())
        self.register_parameter("bias", bias)
        self.register_buffer("indices", weight.indices)
        self.register_buffer("indptr", weight.indptr)
        self._prepare()

    @classmethod
    def from_dense(
        cls,
        linear: torch.nn.Linear,
        block: int | tuple[int, int] = 16,
        sparsity: float | None = None,
        *,
        activation: str | None = None,
        precision: str | None = None,
    ) -> BsrLinear:
        """Make a layer from blocks of a dense one, which are copied.

        Parameters
        ----------
        linear
            A layer of float32, float16 or bfloat16, without NaN. If it is pruned by `torch.nn.utils.prune`,
            parametrized or normalised, its present effective weight is used.
        block
            Rows and columns of a block, or one number for both. Where they do not divide `out_features` and
            `in_features`, the layer is padded, see `features` of the class.
        sparsity
            Share of the blocks that become zero, 0 <= sparsity <= 1, rounded to whole blocks: those with the smallest
            sum of squares, the last ones among equals. None: those that are zero already.
        activation, precision
            As in the class.

        Raises
        ------
        TypeError, ValueError
            For arguments that do not fit, naming them; for a subclass with a forward of its own, which may compute
            something else.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        instead = "make a BsrLinear of its weight by BsrLinear.from_torch(weight.to_sparse_bsr(block))"
        refuse_own_forward("linear", linear, torch.nn.Linear, instead=instead)
        dense, bias = effective(linear, "weight"), effective(linear, "bias")
        assert dense is not None
        if dense.dtype not in DTYPES:
            raise ValueError(f"linear: expected a weight of {', '.join(FLOATS)}, got {dense.dtype}; convert it first")
        rows, cols = block_of(block)
        features = linear.out_features, linear.in_features
        dense = torch.nn.functional.pad(dense, (0, -features[1] % cols, 0, -features[0] % rows))
        n, k = dense.shape
        blocks = dense.reshape(n // rows, rows, k // cols, cols).transpose(1, 2)
        scores = blocks.float().square().sum((2, 3))
        if bool(scores.isnan().any()):
            raise ValueError("linear: expected a weight without NaN, which has no magnitude")
        if sparsity is None:
            kept = (blocks != 0).flatten(2).any(2)
        else:
            if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity <= 1:
                raise ValueError(f"sparsity: expected a number from 0 to 1, got {sparsity!r}")
            kept = torch.zeros_like(scores, dtype=torch.bool)
            best = scores.flatten().sort(descending=True, stable=True).indices
            kept.view(-1)[best[: round((1 - sparsity) * scores.numel())]] = True
        indices = kept.nonzero()[:, 1].to(torch.int32)
        counts = kept.sum(1)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        weight = BsrWeight((blocks[kept].contiguous(), indices, indptr), columns=k)
        own = None if bias is None else bias.clone()
        made = cls(weight, own, activation=activation, features=features, precision=precision)
        made.data.requires_grad_(trained(linear, "weight"))
        if made.bias is not None:
            made.bias.requires_grad_(trained(linear, "bias"))
        return made.train(linear.training)

    @classmethod
    def from_torch(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str | None = None,
        precision: str | None = None,
    ) -> BsrLinear:
        """Make a layer with a copy of a weight in PyTorch's BSR format, as from `to_sparse_bsr`.

        Raises
        ------
        TypeError, ValueError
            As in the class.
        """
        if not isinstance(weight, torch.Tensor) or weight.layout is not torch.sparse_bsr:
            what = weight.layout if isinstance(weight, torch.Tensor) else type(weight).__name__
            raise TypeError(f"weight: expected a tensor of layout torch.sparse_bsr, got {what}")
        given = BsrWeight(weight.detach().clone())
        own = None if bias is None else bias.detach().clone()
        return cls(given, own, activation=activation, precision=precision)

    def freeze(self, *, dense: bool | None = None) -> BsrLinear:
        """Declare that nobody writes the blocks from now on, as in inference; as a parameter they need no gradient.

        Calls without a gradient then have a `constant` weight, as in `BsrWeight`: they take PyTorch's product with a
        dense copy of the weight where that is likely to be faster. The first such call makes the copy, of
        `out_features * in_features` elements, and the layer keeps it. Loading a state dict, moving or converting the
        layer drops the copy; `layer.data.requires_grad_()` thaws the layer.

        Parameters
        ----------
        dense
            As in `bsr_matmul`: False makes no copy, True always takes the dense product.

        Returns
        -------
        layer
            The layer itself.
        """
        self.data.requires_grad_(False)
        self._frozen, self._dense = True, dense
        self._kept = None
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., out_features)` for x `(..., in_features)`."""
        if self._padded == (self.out_features, self.in_features):
            return self._product(x, self.bias)
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x: expected {self.in_features} columns, as the layer has, got shape {tuple(x.shape)}")
        rows, cols = self._padded[0] - self.out_features, self._padded[1] - self.in_features
        bias, pad = self.bias, torch.nn.functional.pad
        y = self._product(pad(x, (0, cols)) if cols else x, pad(bias, (0, rows)) if rows and bias is not None else bias)
        return y[..., : self.out_features].contiguous()

    def _product(self, x: torch.Tensor, bias: Any) -> torch.Tensor:
        """The result for a bias of the padded weight, and an x that has its columns."""
        data = self.data
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, data, bias = x.to(dtype), data.to(dtype), None if bias is None else bias.to(dtype)
        elif not self._in_graph(x, data, bias):
            weight, kept = self._eager(data, self.bias)
            bias = kept if bias is self.bias else bias.detach()
            dense = self._dense if weight.constant else None
            return bsr_matmul(x, weight, bias=bias, activation=self.activation, dense=dense, precision=self.precision)
        if self._trains_dense(x, data):
            high = self._block_rows() if unseen(x, data, bias) else None
            return dense_product(x, (data, self.indices, self.indptr), bias, self.activation, high=high)
        if unseen(x, data, bias):
            known = self._known
            if known is None or known.indices is not self.indices:  # a module takes long to set an attribute
                known = self._known = self._structures()
            return Trained.apply(x, data, bias, self.activation or "", known)
        known = self._structures()
        options = {"bias": bias, "activation": self.activation, "backward": known.turned}
        return product(x, (data, known.indices, known.indptr), known.order, known.structure, **options)

    def _block_rows(self) -> Any:
        """As `distinct_rows`, computed once for a structure."""
        kept = self._rows
        if kept is None or kept[0] is not self.indices:
            kept = self._rows = self.indices, distinct_rows(self.indices, self.indptr)
        return kept[1]

    def _structures(self) -> Known:
        """The buffers of the structure."""
        places, indices, indptr, order = (getattr(self, name) for name in _TURNED)
        back = Turned(places, indices, indptr, order, self._turned_structure)
        return Known(self.indices, self.indptr, self.order, self._structure, back)

    def _trains_dense(self, x: Any, data: Any) -> bool:
        """Whether a step of training takes dense products."""
        rows = x.numel() // x.shape[-1] if x.dim() > 1 else 1
        if not (x.is_cuda and data.requires_grad and torch.is_grad_enabled() and type(rows) is int):
            return False
        (n, k), where = self._padded, gpu()
        block, dtype = self.block_shape, dtype_name(x.dtype)
        return where is not None and rows > 0 and trains_dense(rows, k, n, block, data.shape[0], dtype, where)

    def _in_graph(self, x: Any, data: Any, bias: Any) -> bool:
        """Whether PyTorch has to see the operator: it traces, or a gradient is required."""
        if torch.compiler.is_compiling() or type(x) is not torch.Tensor or torch.jit.is_tracing():
            return True
        if not torch.is_grad_enabled():
            return False
        return x.requires_grad or data.requires_grad or (bias is not None and bias.requires_grad)

    def _eager(self, data: Any, bias: Any) -> tuple[BsrWeight, Any]:
        """Weight and bias without gradients, with the kernels of earlier calls."""
        constant = self._frozen and not data.requires_grad
        # A layer that was trained between two times of being frozen has other blocks in the same place.
        version = data._version if constant and not data.is_inference() else 0
        where = data.data_ptr(), 0 if bias is None else bias.data_ptr(), constant, version
        kept = self._kept
        if kept is None or kept[2] != where:
            parts = data.detach(), self.indices, self.indptr
            structure = Structure.unpacked(self._structure)._replace(constant=constant).packed()
            weight = BsrWeight.assembled(parts, self.order, structure)
            kept = self._kept = weight, None if bias is None else bias.detach(), where
        return kept[0], kept[1]

    @property
    def weight(self) -> torch.Tensor:
        """The dense matrix, see the attributes."""
        return self.dense() if torch.compiler.is_compiling() else DenseWeight(self)

    def dense(self) -> torch.Tensor:
        """The dense matrix `(out_features, in_features)` as a new tensor, through which gradients
        flow to the blocks.
        """
        found = dense_matrix(self.data, self.indices, self.indptr, self._padded)
        return found[: self.out_features, : self.in_features]

    # ---- life ------------------------------------------------------------------------------------

    def to_dense(self) -> torch.nn.Linear:
        """A `torch.nn.Linear` with the same weight and bias, without the activation."""
        dense = self._eager(self.data, self.bias)[0].to_dense()[: self.out_features, : self.in_features].contiguous()
        found = torch.nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        found.weight = torch.nn.Parameter(dense)
        if self.bias is not None:
            found.bias = torch.nn.Parameter(self.bias.detach().clone())
        return found.train(self.training)

    def extra_repr(self) -> str:
        rows, cols = self.block_shape
        blocks = (self._padded[0] // rows) * (self._padded[1] // cols)
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" block={rows}x{cols}, sparsity={1 - self.data.shape[0] / max(1, blocks):.3g}"
        )
        if self._padded != (self.out_features, self.in_features):
            text += f", padded to {self._padded[0]}x{self._padded[1]}"
        named = {"activation": self.activation, "precision": self.precision}
        return text + "".join(f", {name}={value!r}" for name, value in named.items() if value is not None)

    def _prepare(self) -> None:
        """Analyse the structure for kernels, and make the transposed one."""
        self._kept = self._known = self._rows = None
        if self.data.device.type == "meta":
            return
        itemsize, block_cols = self.data.element_size(), self._padded[1] // self.block_shape[1]
        order, long, pattern = balanced(self.indptr, self.indices, self.block_shape, block_cols, itemsize)
        self._structure = Structure(self._padded[1], long, pattern, tf32=self.precision is not None).packed()
        found = turned(self.indices, self.indptr, self._padded[1], self.block_shape, itemsize)
        self._turned_structure = found.structure
        for name, tensor in zip((_ORDER, *_TURNED), (order, *found[:4]), strict=True):
            self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> BsrLinear:
        check_conversion(self, fn)
        super()._apply(fn, recurse)
        self._prepare()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        names = [f"{prefix}{name}" for name in ("data", "indices", "indptr")]
        errors = rest[-1]
        if all(name in state_dict for name in names):
            data, indices, indptr = (state_dict[name] for name in names)
            rows, cols = self.block_shape
            starts = (self._padded[0] // rows + 1,)
            try:
                if tuple(data.shape[1:]) != self.block_shape or tuple(indptr.shape) != starts:
                    raise ValueError(
                        f"blocks of {rows}x{cols} of {self._padded[0]} rows expected, got data of shape"
                        f" {tuple(data.shape)} and indptr of {tuple(indptr.shape)}"
                    )
                # Another structure for the same shape is checked, and buffers of its size are made.
                BsrWeight((data, indices, indptr), columns=self._padded[1], validate=True, balance=False)
            except (TypeError, ValueError) as error:
                errors.append(f"{prefix.rstrip('.') or 'BsrLinear'}: {error}")
                return
            if data.shape != self.data.shape:
                with torch.no_grad():
                    self.data = torch.nn.Parameter(self.data.new_empty(data.shape), self.data.requires_grad)
                    self.indices = self.indices.new_empty(indices.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        # Kernels cannot be copied.
        return {**self.__dict__, "_kept": None, "_known": None, "_rows": None}


def sparsify(
    model: torch.nn.Module,
    *,
    block: int | tuple[int, int] = 16,
    sparsity: float | None = 0.9,
    filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    pad: bool = False,
    precision: str | None = None,
) -> Swapped:
    """Replace the linear layers of a model, in place, by `BsrLinear`.

    Parameters
    ----------
    model
        The model, with linear layers at any depth. A layer that occurs twice is replaced by one layer that occurs
        twice. For layers that are pruned by `torch.nn.utils.prune`, parametrized or normalised, the present effective
        weight is used.
    block, sparsity
        As in `BsrLinear.from_dense`; each layer gets this share of zero blocks. None keeps the zeros of layers that
        were pruned before.
    filter
        (name, layer) -> whether to replace it, such as `lambda name, layer: "mlp" in name`. By default all are replaced
        except those that blocks do not divide, and those that share their weight with another module, such as an output
        layer with the embedding, since they would no longer be tied.
    pad
        Whether layers that blocks do not divide are replaced, too, by padded ones.
    precision
        As in `BsrLinear`.

    Returns
    -------
    swapped
        A dict of the new layers by name, empty if none was replaced. Its attribute `skipped` has the reason for every
        linear layer that was not.

    Raises
    ------
    TypeError
        If the model is a linear layer itself: use `BsrLinear.from_dense`.
    ValueError
        As in `BsrLinear.from_dense`, and for a layer that the filter takes and blocks do not divide, without `pad`;
        then nothing has been changed.

    Notes
    -----
    Subclasses of `torch.nn.Linear` are not replaced: they may compute something else, or other modules may read their
    weight (`torch.nn.MultiheadAttention` does). Code that reads `layer.weight` of a replaced layer gets the dense
    matrix, see `BsrLinear`. Pruning by magnitude costs accuracy without fine-tuning. For fine-tuning, make the
    optimiser after this call, since the blocks are parameters of the new layers. For inference, `freeze` each new
    layer.
    """
    if isinstance(model, torch.nn.Linear):
        raise TypeError("model: is a linear layer itself; use tvm_sparse.nn.BsrLinear.from_dense")
    rows, cols = block_of(block)
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    made: dict[int, BsrLinear] = {}
    places: list[tuple[str, torch.nn.Module, str, BsrLinear]] = []
    skipped: dict[str, str] = {}
    for path, parent in model.named_modules():
        for name, layer in parent._modules.items():  # named_children would name a shared layer only once
            full = f"{path}.{name}" if path else name
            if not isinstance(layer, torch.nn.Linear):
                continue
            why = _kept_for(layer)
            whole = pad or not (layer.out_features % rows or layer.in_features % cols)
            parted = f"blocks of {rows}x{cols} do not divide its shape {(layer.out_features, layer.in_features)}"
            if why is None and filter is not None:
                why = None if filter(full, layer) else "the filter leaves it out"
                if why is None and not whole:
                    raise ValueError(f"block: {full}: {parted}; pad=True pads it")
            elif why is None:
                own = {id(module) for module in layer.modules()}
                if not whole:
                    why = f"{parted}; pad=True pads it"
                elif any(owners[id(parameter)] - own for parameter in parameters_of(layer, "weight")):
                    why = "it shares its weight with another module"
            if why is not None:
                skipped[full] = why
                continue
            if id(layer) not in made:
                made[id(layer)] = BsrLinear.from_dense(layer, (rows, cols), sparsity, precision=precision)
            places.append((full, parent, name, made[id(layer)]))
    for _, parent, name, new in places:
        parent.add_module(name, new)
    return Swapped({full: new for full, _, _, new in places}, skipped)


def _kept_for(layer: torch.nn.Linear) -> str | None:
    """Why a layer of this class is not replaced, or None."""
    why = own_forward(layer, torch.nn.Linear)
    if why is None and plain_class(layer) is not torch.nn.Linear:
        why = f"it is a {type(layer).__name__}, a subclass of torch.nn.Linear, whose weight others may read"
    return why

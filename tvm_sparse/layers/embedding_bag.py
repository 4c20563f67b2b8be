"""Sums of table rows as a module, which needs PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.given import described, integer
from ..formats.quantized import STORED, QuantizedEmbedding, quantize_embedding
from ..operators.nhot_lookup import torch_op
from ..operators.nhot_lookup.call import CsrRows, EmbeddingTables, nhot_lookup, padding_of
from ..operators.nhot_lookup.problem import MODES
from ..operators.nhot_lookup.tables import first_rows_of
from .modules import check_conversion, parameter, refuse_own_forward

INDEX_DTYPES = (torch.int32, torch.int64)


class NHotEmbeddingBag(torch.nn.Module):
    """`nhot_lookup` as a module like `torch.nn.EmbeddingBag`: a sum, weighted or not, a mean or a maximum of table rows
    for each bag.

    Parameters
    ----------
    num_embeddings, embedding_dim
        Rows and columns of the table, which is drawn from a normal distribution.
    mode
        "sum", "mean" or "max", as in `nhot_lookup`.
    padding_idx
        Index of a table row that contributes nothing to any bag, nor counts for a mean, and has no gradient; it is
        zeros at first. A negative one counts from the table's end.
    stored
        "" for a table of floating numbers; "int8" or "float8_e4m3fn" for one in eight bits with a scale a row
        (`quantize_embedding`), which takes and reads half of the bytes of one in 16 bits, and cannot be trained.
    device, dtype
        Device and dtype of the table, or of the results with a table in eight bits; float32, float16 or bfloat16.
    validate
        Also check indices on a GPU, which costs a synchronisation; on the host they are always checked.

    Attributes
    ----------
    weight
        `(num_embeddings, embedding_dim)` parameter, with the name and shape of `torch.nn.EmbeddingBag`, so that state
        dicts are interchangeable. With `stored` a buffer: the bytes, uint8.
    scales
        With `stored` a `(num_embeddings, 1)` float32 buffer, which no conversion of the module changes; otherwise None.

    Raises
    ------
    TypeError, ValueError
        For another mode or dtype, or a padding_idx that is no row of the table.

    Notes
    -----
    The gradient of the table is dense. `from_torch` converts a `torch.nn.EmbeddingBag`. The module can be moved,
    converted, copied, pickled, compiled and exported. Conversions without a kernel, such as `double()`, raise a
    TypeError and change nothing.
    """

    weight: Any
    scales: Any

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "sum",
        padding_idx: int | None = None,
        stored: str = "",
        device: Any = None,
        dtype: Any = None,
        validate: bool = False,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.validate, self.include_last_offset = mode, validate, False
        if stored and stored not in STORED:
            raise ValueError(f"stored: expected '' or one of {', '.join(STORED)}, got {stored!r}")
        self.stored, self.dtype, self.scales = stored, dtype or torch.get_default_dtype(), None
        self.padding_idx = None if padding_idx is None else padding_of(padding_idx, num_embeddings)
        weight = torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        torch.nn.init.normal_(weight)
        if self.padding_idx is not None:
            weight[self.padding_idx].fill_(0)
        self._hold(torch.nn.Parameter(weight))

    @classmethod
    def from_torch(cls, bag: torch.nn.EmbeddingBag, *, stored: str = "", validate: bool = False) -> NHotEmbeddingBag:
        """Convert a `torch.nn.EmbeddingBag`, sharing its parameter; or, with `stored`, with a copy in eight bits.

        If the bag is pruned by `torch.nn.utils.prune`, parametrized or normalised, the parameter is a copy of its
        present effective weight.

        Raises
        ------
        TypeError
            If it is not a `torch.nn.EmbeddingBag`, or a subclass with another `forward`.
        ValueError
            For unsupported options: `max_norm`, `scale_grad_by_freq` and sparse gradients.
        """
        if not isinstance(bag, torch.nn.EmbeddingBag):
            raise TypeError(f"bag: expected a torch.nn.EmbeddingBag, got {type(bag).__name__}")
        instead = "make an NHotEmbeddingBag and load its weight"
        refuse_own_forward("bag", bag, torch.nn.EmbeddingBag, instead=instead)
        for name, wanted in (
            ("max_norm", None),
            ("scale_grad_by_freq", False),
            ("sparse", False),
        ):
            if getattr(bag, name) != wanted:
                raise ValueError(f"bag: expected {name}={wanted}, got {getattr(bag, name)}")
        options: dict[str, Any] = {"mode": bag.mode, "padding_idx": bag.padding_idx, "validate": validate}
        made = cls(bag.num_embeddings, bag.embedding_dim, device="meta", **options)
        weight = parameter(bag, "weight")
        assert weight is not None
        made.stored, made.dtype, made.include_last_offset = stored, weight.dtype, bag.include_last_offset
        made._hold(weight)
        return made.train(bag.training)

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> torch.Tensor:
        """Sums, means or maxima of rows of the table.

        Parameters
        ----------
        input
            `(bags, n)` int32 or int64 indices, n per bag; `(entries,)` indices with `offsets`; or sparse rows `(bags,
            num_embeddings)` as for `nhot_lookup` (`CsrRows`, `(indptr, indices, values)` or a tensor in CSR format),
            without the other arguments.
        offsets
            `(bags,)` int32 or int64: where bags begin in a one-dimensional input, the first at 0. With
            `include_last_offset` there is one more, the number of entries.
        per_sample_weights
            Weights with the shape of `input`, in the dtype of the table or float32; only with the mode "sum".

        Returns
        -------
        result
            `(bags, embedding_dim)`; 0 for an empty bag. Sums and means are computed in float32 and rounded once to the
            dtype of the table, as are their gradients.

        Raises
        ------
        TypeError, ValueError
            For arguments that do not fit, naming them, and as in `nhot_lookup`.
        """
        if isinstance(input, (CsrRows, tuple)) or input.layout is torch.sparse_csr:
            if offsets is not None or per_sample_weights is not None:
                raise ValueError("input: sparse rows have their own row starts and weights")
            return self._looked_up(input)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ValueError(f"per_sample_weights: expected the mode sum, got {self.mode}")
            if per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights: expected shape {tuple(input.shape)}, as input has, got"
                    f" {tuple(per_sample_weights.shape)}"
                )
            per_sample_weights = per_sample_weights.reshape(-1)
        return self._looked_up((self._starts(input, offsets), input.reshape(-1), per_sample_weights))

    def _hold(self, weight: torch.nn.Parameter) -> None:
        """Keep the table, or its bytes and scales."""
        if not self.stored:
            self.weight = weight
            return
        for name in ("weight", "scales"):
            if hasattr(self, name):
                delattr(self, name)
        if weight.is_meta:
            octets, scales = (
                weight.new_empty(weight.shape, dtype=torch.uint8),
                weight.new_empty((len(weight), 1)).float(),
            )
        else:
            embedding = quantize_embedding(weight, self.stored)
            octets, scales = embedding.octets, embedding.scales
        self.register_buffer("weight", octets)
        self.register_buffer("scales", scales)

    def _looked_up(self, csr: Any) -> torch.Tensor:
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        function = torch_op.nhot_lookup if traced else nhot_lookup
        options: dict[str, Any] = {"mode": self.mode, "padding_idx": self.padding_idx, "validate": self.validate}
        return function(csr, self._table(), dtype=self.dtype if self.stored else None, **options)

    def _table(self) -> Any:
        """The table, as `nhot_lookup` takes it."""
        return QuantizedEmbedding.of_octets(self.weight, self.scales, self.stored) if self.stored else self.weight

    def _starts(self, input: torch.Tensor, offsets: Any) -> torch.Tensor:
        """Begin of each bag, and the end of the last one."""
        if input.dtype not in INDEX_DTYPES:
            raise ValueError(f"input: expected indices of int32 or int64, got {input.dtype}")
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets: a two-dimensional input has bags of one size, and no offsets")
            bags, n = input.shape
            dtype = input.dtype if input.numel() < 2**31 else torch.int64  # must count all entries
            return torch.arange(bags + 1, dtype=dtype, device=input.device) * n
        if input.dim() != 1:
            raise ValueError(f"input: expected one or two dimensions, got shape {tuple(input.shape)}")
        if offsets is None or offsets.dim() != 1 or offsets.dtype not in INDEX_DTYPES:
            got = None if offsets is None else f"{offsets.dtype} of shape {tuple(offsets.shape)}"
            raise ValueError(f"offsets: expected one dimension of int32 or int64, got {got}")
        if self.include_last_offset:
            return offsets
        return torch.cat([offsets, offsets.new_full((1,), input.shape[0])])

    def _apply(self, fn: Any, recurse: bool = True) -> NHotEmbeddingBag:
        check_conversion(self, fn)
        scales = self.scales
        super()._apply(fn, recurse)
        if scales is not None:
            self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scales.device)).dtype
            if self.scales.dtype is not torch.float32:
                self.scales = scales.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        stored = f", stored={self.stored!r}" if self.stored else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{padding}{stored}"


class NHotEmbeddingBags(NHotEmbeddingBag):
    """Several embedding bags of one width, all looked up by one launch: as a list of `torch.nn.EmbeddingBag` whose
    results stand side by side.

    Parameters
    ----------
    sizes
        Number of rows of each table.
    embedding_dim
        Columns of every table.
    options
        `mode`, `padding_idx` (one index for all tables, at least 0), `stored`, `device`, `dtype` and `validate`, as of
        `NHotEmbeddingBag`.

    Attributes
    ----------
    weight, scales
        As of `NHotEmbeddingBag`, with the rows of all tables, those of the first table first (`EmbeddingTables`).

    Raises
    ------
    TypeError, ValueError
        As for `NHotEmbeddingBag` and `EmbeddingTables`.

    Notes
    -----
    With a `padding_idx` the row of that index is zeros at first in each table that has it.
    """

    first_rows: Any

    def __init__(
        self, sizes: Sequence[int], embedding_dim: int, *, padding_idx: int | None = None, **options: Any
    ) -> None:
        self.sizes = tuple(integer("sizes", size) for size in sizes)
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes: expected at least one number, each at least 1, got {self.sizes}")
        padding = None if padding_idx is None else padding_of(padding_idx, 0, self.sizes)
        super().__init__(sum(self.sizes), embedding_dim, **options)
        self.padding_idx = padding
        self.register_buffer("first_rows", self._first_rows(), persistent=False)
        if padding is not None:
            starts = first_rows_of(self.sizes).tolist()
            rows = [first + padding for first, size in zip(starts, self.sizes, strict=True) if padding < size]
            with torch.no_grad():
                self.weight[rows] = 0

    @classmethod
    def from_torch(cls, bags: Any, *, stored: str = "", validate: bool = False) -> NHotEmbeddingBags:
        """Convert a list of `torch.nn.EmbeddingBag` of one width, dtype, mode and `padding_idx`, copying their weights.

        Raises
        ------
        TypeError, ValueError
            As for `NHotEmbeddingBag.from_torch`, and for bags that differ in more than their number of rows.
        """
        if not isinstance(bags, (list, tuple, torch.nn.ModuleList)) or not all(
            isinstance(bag, torch.nn.EmbeddingBag) for bag in bags
        ):
            raise TypeError(f"bags: expected a list of torch.nn.EmbeddingBag, got {described(bags)}")
        given: list[Any] = list(bags)
        made = [NHotEmbeddingBag.from_torch(bag) for bag in given]
        kinds = {(bag.embedding_dim, bag.mode, bag.padding_idx, bag.weight.dtype, bag.weight.device) for bag in made}
        if len(kinds) != 1:
            raise ValueError(
                f"bags: expected one embedding_dim, mode, padding_idx, dtype and device, got {sorted(map(str, kinds))}"
            )
        [(width, mode, padding_idx, _, _)] = kinds
        sizes = [bag.num_embeddings for bag in made]
        found = cls(sizes, width, mode=mode, padding_idx=padding_idx, device="meta", validate=validate)
        weight = torch.cat([bag.weight.detach() for bag in made])
        found.stored, found.dtype = stored, weight.dtype
        found._hold(torch.nn.Parameter(weight, any(bag.weight.requires_grad for bag in made)))
        found.first_rows = found._first_rows()
        return found

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> torch.Tensor:
        """Sums, means or maxima of rows of every table.

        Parameters
        ----------
        input, offsets, per_sample_weights
            A list for each, with what `NHotEmbeddingBag.forward` takes for each table, of equally many bags; indices
            `(tables, bags, entries)` alone; or, as tables in other libraries have it, `(entries,)` indices of all
            tables, those of the first table first, with `(tables * bags + 1,)` offsets, the last of which is the number
            of entries, and `(entries,)` weights. Indices count from the first row of their table.

        Returns
        -------
        result
            `(bags, tables * embedding_dim)`: row b has the results of the tables for bag b side by side.

        Raises
        ------
        TypeError, ValueError
            For arguments that do not fit, naming them, and as in `nhot_lookup`.
        """
        weights = per_sample_weights
        if isinstance(input, torch.Tensor) and input.dim() == 3:
            input = input.unbind()
        if isinstance(input, (list, tuple)):
            input, offsets, weights = self._joined(input, offsets, weights)
        elif offsets is None or input.dim() != 1:
            raise ValueError(
                "input: expected a list for each table, three dimensions (tables, bags, entries), or one dimension of"
                " all indices, with offsets"
            )
        if weights is not None and self.mode != "sum":
            raise ValueError(f"per_sample_weights: expected the mode sum, got {self.mode}")
        return self._looked_up((offsets, input, weights))

    def _joined(self, input: Any, offsets: Any, weights: Any) -> tuple[Any, Any, Any]:
        """Lists for each table as one array each."""
        tables = len(self.sizes)
        lists = {"input": input, "offsets": offsets, "per_sample_weights": weights}
        for name, given in lists.items():
            if given is not None and (not isinstance(given, (list, tuple)) or len(given) != tables):
                raise ValueError(f"{name}: expected a list of {tables}, one for each table")
        starts = [self._starts(one, None if offsets is None else offsets[t]) for t, one in enumerate(input)]
        if any(one.shape[0] != starts[0].shape[0] for one in starts):
            raise ValueError(
                f"input: expected equally many bags for each table, got {[len(one) - 1 for one in starts]}"
            )
        flat, before, joined = [one.reshape(-1) for one in input], 0, []
        for own, start in zip(flat, starts, strict=True):
            joined.append(start[:-1] + before)
            before += own.shape[0]
        joined.append(starts[-1].new_full((1,), before))
        return (
            torch.cat(flat),
            torch.cat(joined),
            None if weights is None else torch.cat([one.reshape(-1) for one in weights]),
        )

    def _first_rows(self) -> torch.Tensor:
        """The row at which each table begins, where the weight lies."""
        return torch.from_numpy(first_rows_of(self.sizes)).to(self.weight.device)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        # On the meta device they were lost.
        self.first_rows = self._first_rows()

    def _table(self) -> Any:
        return EmbeddingTables(super()._table(), self.sizes, self.first_rows)

    def extra_repr(self) -> str:
        return f"{self.sizes}{super().extra_repr().removeprefix(str(self.num_embeddings))}"

"""A module that replaces a model's `lm_head`, which needs PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from ..core.given import integer
from ..formats.quantized import STORED, quantize_embedding
from ..operators.head_topk.call import scores_of
from .lsh_head import LshHead
from .modules import check_conversion, parameter, refuse_own_forward
from .settings import HASHED, Hashing, Settings

PATHS = ("lsh", "exact", "quantized")


class LmHead(torch.nn.Module):
    """Logits over the vocabulary, computed for candidate words only; all others are -inf.

    It replaces the `torch.nn.Linear` at the end of a language model, so that code which uses logits still works, such
    as Hugging Face's `generate` with its logits processors. `LmHead.replace(model)` installs it.

    Parameters
    ----------
    weight
        `(vocab, hidden)` parameter, which is shared: a tied embedding stays tied, and the state dict is unchanged.
    bias
        `(vocab,)` parameter or None.
    path
        "lsh"; "exact" for the replaced product; or "quantized" for logits of all words from a copy of the weight in
        eight bits (`quantize_embedding`), which is read in half the time of one in 16 bits. An attribute of the same
        name may be set at any time.
    beam
        Number of neighbouring rows that share candidates: `num_beams` of `generate`. In calls with a number of rows
        that it does not divide, each row has its own.
    exact_above
        Calls with more candidate lists than this use the exact product, since each list reads its own rows of the
        weight. Prompts are the usual case. With `path="quantized"` it counts rows that do not share candidates alike.
    stored
        The dtype of the copy in eight bits: "float8_e4m3fn" or "int8".
    options
        Options of `LshHead`: `k`, `units`, `bands`, `threshold`, `frequent`, `capacity`, `seed`, `table`.

    Attributes
    ----------
    head
        The `LshHead`, which shares the weight; None on the meta device.
    counts
        `(lists,)` int32 on the device: numbers of candidates of the last call's lists; None after an exact product.
        Candidates beyond `head.settings.capacity` were left out: their logits are -inf.

    Raises
    ------
    TypeError, ValueError
        As in `LshHead`.

    Notes
    -----
    On the meta device there is no head; the first call after the weight is materialised hashes it. Under
    `torch.autocast` logits are computed in the weight's own dtype, and rounded. Conversions without a kernel, such as
    `double()`, raise a TypeError and change nothing. `torch.jit.trace` supports only the exact path.

    When not to use it: for training. If a gradient is required, the exact product is used; call `rebuild` after the
    weight has changed. If only top-k, sampling or beam search follows, `LshHead` and `beam_search` are faster, since
    they write no logits.

    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU".
    """

    head: Any
    weight: Any

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        path: str = "lsh",
        beam: int = 1,
        exact_above: int = 64,
        stored: str = "float8_e4m3fn",
        **options: Any,
    ) -> None:
        super().__init__()
        for name, given in (("weight", weight), ("bias", bias)):
            if not isinstance(given, torch.nn.Parameter) and (given is not None or name == "weight"):
                raise TypeError(f"{name}: expected a torch.nn.Parameter, got {type(given).__name__}")
        if path not in PATHS:
            raise ValueError(f"path: expected one of {', '.join(PATHS)}, got {path!r}")
        if "path" in options or "bias" in options:
            raise TypeError("options: path and bias are those of the module")
        self.beam, self.exact_above = integer("beam", beam), integer("exact_above", exact_above)
        if self.beam < 1:
            raise ValueError(f"beam: expected at least 1, got {beam}")
        if stored not in STORED:
            raise ValueError(f"stored: expected one of {', '.join(STORED)}, got {stored!r}")
        self.path, self.stored = path, stored
        self.weight, self.bias = weight, bias
        self.options = options
        self.counts: Any = None
        for name in HASHED:
            self.register_buffer(name, None, persistent=False)
        self.rebuild()

    @classmethod
    def replace(cls, model: Any, **options: Any) -> LmHead:
        """Replace a Hugging Face model's `lm_head` by a new module, and return that.

        `options` are those of the class. `model.set_output_embeddings(module.linear())` reverts it. If the output
        embeddings are pruned by `torch.nn.utils.prune`, parametrized or normalised, the weight is a copy of their
        present effective weight.

        Raises
        ------
        TypeError
            If the model's output embeddings are not a `torch.nn.Linear`, or are a subclass with another `forward`.
        """
        linear: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(
                f"model: expected output embeddings that are a torch.nn.Linear, got {type(linear).__name__} of"
                f" {type(model).__name__}"
            )
        instead = "make an LmHead of the parameter that it multiplies with"
        refuse_own_forward("model", linear, torch.nn.Linear, instead=instead)
        weight = parameter(linear, "weight")
        assert weight is not None
        module = cls(weight, parameter(linear, "bias"), **options)
        model.set_output_embeddings(module)
        return module

    def linear(self) -> torch.nn.Linear:
        """A `torch.nn.Linear` with the same parameters: the exact product as a module."""
        vocab, hidden = self.weight.shape
        found: Any = torch.nn.Linear(hidden, vocab, bias=self.bias is not None, device="meta")
        found.weight = self.weight
        if self.bias is not None:
            found.bias = self.bias
        return found

    def rebuild(self) -> None:
        """Hash the present weight, or have it rounded to eight bits at the next call; on the meta device, at the first
        call after the weight is materialised.
        """
        self._quantized: tuple[Any, ...] = (None, None)
        if self.weight.is_meta or self.path == "quantized":
            self.head = None
            return
        head = LshHead(self.weight.detach(), bias=self._float_bias(), **self.options)
        for name in HASHED:
            setattr(self, name, getattr(head.hashing, name, None))
        self._hold(head)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(..., vocab)` of hidden states `(..., hidden)`, in their dtype; -inf for words that are not
        candidates.
        """
        width = hidden.shape[-1]
        rows = hidden.numel() // width if width else 0
        lists = rows if rows % self.beam else rows // self.beam
        learning = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        autocast = torch.is_autocast_enabled(hidden.device.type)
        exact = self.path == "exact" or learning or not 0 < lists <= self.exact_above or self.weight.is_meta
        if torch.jit.is_tracing() and not exact:
            raise RuntimeError(
                "LmHead: torch.jit.trace does not see what a head by hashes computes; set `path` to 'exact' to trace it"
            )
        if exact:
            self.counts = None
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.path == "quantized":
            self.counts = None
            return self._from_copy(hidden.detach().reshape(rows, width)).to(hidden.dtype).view(*hidden.shape[:-1], -1)
        if self.head is None:
            self.rebuild()
        elif self._hashed[0] is not self.weight:  # a model that ties its weights again has replaced the parameter
            self._assemble(self.head.settings)
        states, dtype = hidden.detach().reshape(rows, width), hidden.dtype
        if autocast:
            states, dtype = states.to(self.weight.dtype), torch.get_autocast_dtype(hidden.device.type)
        logits, words, self.counts = self.head.logits(states, sentences=lists)
        vocab, m = self.weight.shape[0], words.shape[1]
        # Positions beyond the candidates write to an additional column.
        columns = torch.where(words < 0, vocab, words).long()[:, None].expand(lists, rows // lists, m)
        full = logits.new_full((lists, rows // lists, vocab + 1), -float("inf"))
        full.scatter_(2, columns, logits.view(lists, rows // lists, m))
        return full[:, :, :vocab].to(dtype).reshape(*hidden.shape[:-1], vocab)

    def _from_copy(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 logits `(rows, vocab)` from the weight in eight bits."""
        embedding, weight = self._quantized
        if weight is not self.weight:
            embedding = quantize_embedding(self.weight, self.stored)
            self._quantized = embedding, self.weight
        states, bias = states.to(self.weight.dtype), self._float_bias()
        return scores_of(states, embedding, bias)

    def extra_repr(self) -> str:
        return f"{None if self.head is None else self.head.settings}, path={self.path!r}, beam={self.beam}"

    def _apply(self, fn: Any, recurse: bool = True) -> LmHead:
        check_conversion(self, fn)
        super()._apply(fn, recurse)
        self._quantized = (None, None)
        if self.weight.is_meta:
            self.rebuild()
        elif self.head is not None:
            self._assemble(self.head.settings)
        return self

    def _assemble(self, settings: Settings) -> None:
        """Make the head from the module's present tensors, without hashing."""
        hashing = None
        if settings.threshold:
            hashing = Hashing(**{name: getattr(self, name) for name in HASHED})
        ids = self.head.frequent
        self._hold(LshHead.assembled(self.weight.detach(), self._float_bias(), settings, hashing, ids))

    def _hold(self, head: LshHead) -> None:
        head.path = "lsh" if head.settings.threshold else "exact"
        # In a tuple, since an attribute would become another parameter of the module.
        self.head, self._hashed = head, (self.weight,)

    def _float_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.detach().float()

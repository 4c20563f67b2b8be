"""A module in the place of a model's `lm_head`, which needs PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from ..core.given import integer
from .lsh_head import LshHead
from .modules import check_conversion, parameter, refuse_own_forward
from .settings import HASHED, Hashing, Settings

PATHS = ("lsh", "exact")


class LmHead(torch.nn.Module):
    """Logits over the vocabulary, computed for candidate words only: the others are -inf.

    It takes the place of the `torch.nn.Linear` at the end of a language model, so that whatever works on logits goes on
    working, as Hugging Face's `generate` with its logits processors. `LmHead.replace(model)` puts it there.

    Parameters
    ----------
    weight
        `(vocab, hidden)` parameter, which is kept: a tied embedding stays tied, and the state dict as it was.
    bias
        `(vocab,)` parameter or None.
    path
        "lsh", or "exact" for the product that it replaces. An attribute of the same name may be set at any time.
    beam
        Neighbouring rows of a call that share candidates: `num_beams` of `generate`. Calls with another number of rows
        give each its own.
    exact_above
        Calls with more candidate lists than this take the exact product: a whole prompt's, above all. Every list has
        its own rows of the weight to read.
    options
        Of `LshHead`: `k`, `units`, `bands`, `threshold`, `frequent`, `capacity`, `seed`, `table`.

    Attributes
    ----------
    head
        The `LshHead`, which shares the weight; None on the meta device.
    counts
        `(lists,)` int32 on the device: candidates of the last call's lists, None after one by the exact product. What
        exceeds `head.settings.capacity` was left out: its logits are -inf.

    Raises
    ------
    TypeError, ValueError
        As `LshHead`.

    On the meta device there is no head; once the weight has left it, the first call hashes the weight. Under
    `torch.autocast` logits are those of the weight's own dtype, rounded. What no kernel computes, as `double()`, raises
    a TypeError, and leaves the module as it was. `torch.jit.trace` takes the exact path alone.

    When not to use it: for training. Where a gradient is wanted the exact product is taken; once the weight has
    changed, `rebuild` hashes it again. Where top-k, sampling or beam search is all that follows, `LshHead` and
    `beam_search` are faster: they write no logits.

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
        self.path = path
        self.weight, self.bias = weight, bias
        self.options = options
        self.counts: Any = None
        for name in HASHED:
            self.register_buffer(name, None, persistent=False)
        self.rebuild()

    @classmethod
    def replace(cls, model: Any, **options: Any) -> LmHead:
        """Put a new module in the place of a Hugging Face model's `lm_head`, and return it.

        `options` are those of the class. `model.set_output_embeddings(module.linear())` takes it out again. Of output
        embeddings that are pruned by `torch.nn.utils.prune`, parametrized or normalised, the weight is a copy of what
        they compute with now.

        Raises
        ------
        TypeError
            If the model's output embeddings are no `torch.nn.Linear`, or a subclass with a forward of its own.
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
        """Hash the weight as it is now; on the meta device, at the first call after it has left that."""
        if self.weight.is_meta:
            self.head = None
            return
        head = LshHead(self.weight.detach(), bias=self._float_bias(), **self.options)
        for name in HASHED:
            setattr(self, name, getattr(head.hashing, name, None))
        self._hold(head)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(..., vocab)` of hidden states `(..., hidden)`, in their dtype; -inf for what is no candidate."""
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
        if self.head is None:
            self.rebuild()
        elif self._hashed[0] is not self.weight:  # a model that ties its weights again has put another one here
            self._assemble(self.head.settings)
        states, dtype = hidden.detach().reshape(rows, width), hidden.dtype
        if autocast:
            states, dtype = states.to(self.weight.dtype), torch.get_autocast_dtype(hidden.device.type)
        logits, words, self.counts = self.head.logits(states, sentences=lists)
        vocab, m = self.weight.shape[0], words.shape[1]
        # Places beyond the candidates write to a column of their own.
        columns = torch.where(words < 0, vocab, words).long()[:, None].expand(lists, rows // lists, m)
        full = logits.new_full((lists, rows // lists, vocab + 1), -float("inf"))
        full.scatter_(2, columns, logits.view(lists, rows // lists, m))
        return full[:, :, :vocab].to(dtype).reshape(*hidden.shape[:-1], vocab)

    def extra_repr(self) -> str:
        return f"{None if self.head is None else self.head.settings}, path={self.path!r}, beam={self.beam}"

    def _apply(self, fn: Any, recurse: bool = True) -> LmHead:
        check_conversion(self, fn)
        super()._apply(fn, recurse)
        if self.weight.is_meta:
            self.rebuild()
        elif self.head is not None:
            self._assemble(self.head.settings)
        return self

    def _assemble(self, settings: Settings) -> None:
        """The head of the module's tensors as they are now, without hashing."""
        hashing = None
        if settings.threshold:
            hashing = Hashing(**{name: getattr(self, name) for name in HASHED})
        ids = self.head.frequent
        self._hold(LshHead.assembled(self.weight.detach(), self._float_bias(), settings, hashing, ids))

    def _hold(self, head: LshHead) -> None:
        head.path = "lsh" if head.settings.threshold else "exact"
        # In a tuple: an attribute would be one more parameter of the module.
        self.head, self._hashed = head, (self.weight,)

    def _float_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.detach().float()

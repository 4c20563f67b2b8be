"""What a call of the LSH head tells beside its result, and a call that is captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .libraries import library


class HeadInfo(NamedTuple):
    """What a call of the head tells beside its result, on the device of the result.

    Attributes
    ----------
    candidates
        `(lists,)` int32: how many words each list had to hold, those that did not fit included.
    log_normaliser
        `(rows,)` float32: log sum_j exp((logit_j + bias_j) / temperature) over the candidates of the row.
    capacity
        Places in a list; the vocab where every word was a candidate.
    """

    candidates: Any
    log_normaliser: Any
    capacity: int

    @property
    def overflow(self) -> Any:
        """`(lists,)` int32: how many words did not fit, and were left out. Computed when it is asked for."""
        return library("candidates", self.candidates).above_zero(self.candidates - self.capacity)


class CapturedHead:
    """`LshHead.topk` of one shape as a CUDA graph: calling it replays the whole step with one launch from the host.

    Attributes
    ----------
    hidden
        `(rows, hidden)`: what the graph reads. Write the hidden states here, or pass them to the call.
    values, indices, info
        What the graph writes: the same tensors at every replay.

    Its kernels share the workspaces of one stream: replays of one captured head must not overlap each other. It may
    take the place of the head in `beam_search`.
    """

    def __init__(
        self, step: Callable[[], tuple[Any, Any, HeadInfo]], hidden: Any, vocab: int, choices: tuple[int, int, bool]
    ) -> None:
        import torch

        self.hidden, self.vocab, self._choices = hidden, vocab, choices
        stream = torch.cuda.Stream(hidden.device)
        stream.wait_stream(torch.cuda.current_stream(hidden.device))
        with torch.cuda.stream(stream):
            # Loads the kernels, and allocates their workspaces for this stream.
            for _ in range(2):
                step()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.values, self.indices, self.info = step()

    def __call__(self, hidden: Any = None) -> tuple[Any, Any, HeadInfo]:
        """Replay on the current stream, with these hidden states, or with what `self.hidden` holds."""
        if hidden is not None:
            if hidden.shape != self.hidden.shape or hidden.dtype != self.hidden.dtype:
                raise ValueError(
                    f"hidden: the graph takes shape {tuple(self.hidden.shape)} and {self.hidden.dtype}, got"
                    f" {tuple(hidden.shape)} and {hidden.dtype}"
                )
            self.hidden.copy_(hidden)
        self._graph.replay()
        return self.values, self.indices, self.info

    def topk(self, hidden: Any, n: int, *, sentences: int = 1, log: bool = False) -> tuple[Any, Any, HeadInfo]:
        """As `LshHead.topk`, for what was captured.

        Raises
        ------
        ValueError
            For anything else.
        """
        if (n, sentences, log) != self._choices:
            wanted = "n={}, sentences={}, log={}".format(*self._choices)
            raise ValueError(f"n, sentences, log: captured was {wanted}; got {n}, {sentences}, {log}")
        return self(hidden)

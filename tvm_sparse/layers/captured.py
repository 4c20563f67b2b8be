"""Calls of layers as CUDA graphs, and the additional results of an LSH head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .libraries import library


class HeadInfo(NamedTuple):
    """Additional results of a head's call, on the same device.

    Attributes
    ----------
    candidates
        `(lists,)` int32: number of candidates of each list, including those that did not fit.
    log_normaliser
        `(rows,)` float32: log sum_j exp((logit_j + bias_j) / temperature) over the candidates of the row.
    capacity
        Most candidates of a list; the vocab if every word was a candidate.
    """

    candidates: Any
    log_normaliser: Any
    capacity: int

    @property
    def overflow(self) -> Any:
        """`(lists,)` int32: number of candidates that did not fit and were left out. Computed on access."""
        return library("candidates", self.candidates).above_zero(self.candidates - self.capacity)


class CapturedHead:
    """`LshHead.topk` for one shape as a CUDA graph: a call replays the whole step with one launch from the host.

    Attributes
    ----------
    hidden
        `(rows, hidden)`: the graph's input. Write the hidden states here, or pass them to the call.
    values, indices, info
        The graph's outputs: the same tensors at every replay.

    Notes
    -----
    Its kernels share the workspaces of one stream: replays of one captured head must not overlap. `beam_search` accepts
    it as a head.
    """

    def __init__(
        self, step: Callable[[], tuple[Any, Any, HeadInfo]], hidden: Any, vocab: int, choices: tuple[int, int, bool]
    ) -> None:
        self.hidden, self.vocab, self._choices = hidden, vocab, choices
        self._graph, (self.values, self.indices, self.info) = recorded(step, hidden.device)

    def __call__(self, hidden: Any = None) -> tuple[Any, Any, HeadInfo]:
        """Replay on the current stream, with these hidden states, or with the content of `self.hidden`."""
        if hidden is not None:
            give("hidden", hidden, self.hidden)
        self._graph.replay()
        return self.values, self.indices, self.info

    def topk(self, hidden: Any, n: int, *, sentences: int = 1, log: bool = False) -> tuple[Any, Any, HeadInfo]:
        """As `LshHead.topk`, for the captured arguments.

        Raises
        ------
        ValueError
            For other arguments than those captured.
        """
        if (n, sentences, log) != self._choices:
            wanted = "n={}, sentences={}, log={}".format(*self._choices)
            raise ValueError(f"n, sentences, log: captured was {wanted}; got {n}, {sentences}, {log}")
        return self(hidden)


class CapturedLayer:
    """A recurrent layer's call for one shape as a CUDA graph: a call replays all its launches at once.

    Attributes
    ----------
    inputs
        The graph's input tensors by name: `x_projected`, `h0`, `c0` for an LSTM, and `resets` and `lengths` if it was
        captured with them. Initially they are zero, and lengths are full. Write into them, or pass tensors to the call.
    outputs
        The graph's outputs: the same tensors at every replay, `(output, h_n)` or `(output, h_n, c_n)`.

    Notes
    -----
    Its kernels share the workspaces of one stream: replays of one captured layer must not overlap.
    """

    def __init__(self, step: Callable[[], tuple[Any, ...]], inputs: Mapping[str, Any]) -> None:
        self.inputs = dict(inputs)
        self._graph, self.outputs = recorded(step, inputs["x_projected"].device)

    def __call__(self, **inputs: Any) -> tuple[Any, ...]:
        """Replay on the current stream, with these inputs, and the present content of the others.

        Raises
        ------
        TypeError, ValueError
            For an input that the graph lacks, or one of another shape or dtype.
        """
        for name, array in inputs.items():
            if name not in self.inputs:
                raise TypeError(f"{name}: the graph was captured with {', '.join(self.inputs)}")
            give(name, array, self.inputs[name])
        self._graph.replay()
        return self.outputs


def recorded(step: Callable[[], Any], device: Any) -> tuple[Any, Any]:
    """Capture a call as a CUDA graph on a separate stream; returns the graph and the call's result."""
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Loads the kernels, and allocates their workspaces for this stream.
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = step()
    return graph, outputs


def give(name: str, array: Any, place: Any) -> None:
    """Copy an argument to a graph's input.

    Raises
    ------
    ValueError
        If it has another shape or dtype.
    """
    if array.shape != place.shape or array.dtype != place.dtype:
        raise ValueError(
            f"{name}: the graph takes shape {tuple(place.shape)} and {place.dtype}, got {tuple(array.shape)} and"
            f" {array.dtype}"
        )
    place.copy_(array)

"""Calls of layers as CUDA graphs, and what a call of the LSH head tells beside its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        self.hidden, self.vocab, self._choices = hidden, vocab, choices
        self._graph, (self.values, self.indices, self.info) = recorded(step, hidden.device)

    def __call__(self, hidden: Any = None) -> tuple[Any, Any, HeadInfo]:
        """Replay on the current stream, with these hidden states, or with what `self.hidden` holds."""
        if hidden is not None:
            give("hidden", hidden, self.hidden)
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


class CapturedLayer:
    """A call of a recurrent layer of one shape as a CUDA graph: calling it replays all its launches with one.

    Attributes
    ----------
    inputs
        By name, the tensors that the graph reads: `x_projected`, `h0`, `c0` of an LSTM, and `resets` and `lengths` if
        it was captured with them. Zeros at first, and full lengths. Write into them, or pass tensors to the call.
    outputs
        What the graph writes: the same tensors at every replay, `(output, h_n)` or `(output, h_n, c_n)`.

    Its kernels share the workspaces of one stream: replays of one captured layer must not overlap each other.
    """

    def __init__(self, step: Callable[[], tuple[Any, ...]], inputs: Mapping[str, Any]) -> None:
        self.inputs = dict(inputs)
        self._graph, self.outputs = recorded(step, inputs["x_projected"].device)

    def __call__(self, **inputs: Any) -> tuple[Any, ...]:
        """Replay on the current stream, with these inputs, and with what the others hold.

        Raises
        ------
        TypeError, ValueError
            For an input that the graph does not have, or of another shape or dtype.
        """
        for name, array in inputs.items():
            if name not in self.inputs:
                raise TypeError(f"{name}: the graph was captured with {', '.join(self.inputs)}")
            give(name, array, self.inputs[name])
        self._graph.replay()
        return self.outputs


def recorded(step: Callable[[], Any], device: Any) -> tuple[Any, Any]:
    """A call as a CUDA graph on a stream of its own, and what it returns there."""
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
    """Copy an argument to where a graph reads it.

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

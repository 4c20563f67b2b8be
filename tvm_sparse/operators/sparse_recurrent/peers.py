"""Peers of `sparse_recurrent`, and the public call. All return the output alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.formats.recurrent import RecurrentWeights

from .call import problem_of, sparse_recurrent
from .problem import RecurrentLayer, SparseRecurrent


def _dense(problem: RecurrentLayer, inputs: Sequence[Any], device: str) -> Any:
    """The weight as a dense `(gates * hidden, hidden)` tensor."""
    import numpy as np

    rows, columns, values = problem.coordinates(inputs)
    found = np.zeros((problem.gates * problem.hidden, problem.hidden), numpy_dtype(problem.dtype))
    found[rows, columns] = values.astype(found.dtype)
    return torch_tensor(found, device)


def _named(problem: RecurrentLayer, inputs: Sequence[Any], device: str) -> dict[str, Any]:
    """The dense arguments by name, as tensors."""
    if problem.ragged or problem.resets:
        raise TypeError("lengths and resets are not compared")
    return _converted(problem, inputs, lambda array: torch_tensor(array, device))


def _converted(problem: RecurrentLayer, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """The arguments after the weight by name; numbers as they are."""
    given = zip(problem.kernel_inputs[3:], inputs[3:], strict=True)
    return {argument.name: convert(value) if argument.shape else value for argument, value in given}


def _torch_layer(problem: RecurrentLayer, inputs: Sequence[Any], device: str) -> Call:
    """torch's layer, dense: cuDNN on a GPU.

    It computes the input product too, here with the identity as one operand: the input of step t and sequence b is a
    unit vector that selects the column x_projected[t, b] of the input weight; or, if that is smaller, the input is
    x_projected and the weight the identity.
    """
    import torch

    if problem.cell not in ("tanh", "relu", "lstm", "gru"):
        raise TypeError(f"torch has no layer of cell={problem.cell}")
    given = _named(problem, inputs, device)
    x = given["x_projected"]
    steps, batch, rows = x.shape
    flat = x.reshape(steps * batch, rows)
    few = len(flat) < rows
    unit = torch.eye(min(len(flat), rows), dtype=x.dtype, device=device)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(problem.cell, torch.nn.RNN)
    options = {"nonlinearity": problem.cell} if problem.gates == 1 else {}
    module = layer(len(unit), problem.hidden, **options).to(device, x.dtype)
    with torch.no_grad():
        module.weight_ih_l0.copy_(flat.T if few else unit)
        module.weight_hh_l0.copy_(_dense(problem, inputs, device))
        module.bias_ih_l0.zero_()
        module.bias_hh_l0.zero_()
        if problem.cell == "gru":
            module.bias_hh_l0[2 * problem.hidden :] = given["hidden_bias"]
    module.flatten_parameters()
    fed = unit.reshape(steps, batch, -1) if few else x
    h0 = given["h0"][None]
    states = (h0, given["c0"][None]) if problem.cell == "lstm" else h0

    def call() -> Any:
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            return module(fed, states)[0]

    return call


def _step_loop(problem: RecurrentLayer, given: dict[str, Any], product: Callable[[Any], Any]) -> Call:
    """The steps one by one, with states `(hidden, batch)` and the products `(gates * hidden, batch)` by a library."""
    import torch

    if problem.exchanges == 2:
        raise TypeError(f"a step of cell={problem.cell} has two products, and is not compared")
    # Transposed beforehand, to the products' layout.
    x = given["x_projected"].transpose(1, 2).contiguous()
    h0: Any = given["h0"].T.contiguous()
    c0: Any = given["c0"].T.contiguous() if problem.cell == "lstm" else None
    bias: Any = given["hidden_bias"][:, None] if problem.cell == "gru" else None

    def call() -> Any:
        h, c, states = h0, c0, []
        for step in x:
            u = product(h)
            if problem.cell == "tanh":
                h = torch.tanh(step + u)
            elif problem.cell == "relu":
                h = torch.relu(step + u)
            elif problem.cell == "clipped_relu":
                h = torch.clamp(step + u, 0, given["limit"])
            elif problem.cell == "lstm":
                i, f, g, o = (step + u).chunk(4)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                (x_r, x_z, x_n), (u_r, u_z, u_n) = step.chunk(3), u.chunk(3)
                z = torch.sigmoid(x_z + u_z)
                n = torch.tanh(x_n + torch.sigmoid(x_r + u_r) * (u_n + bias))
                h = n + z * (h - n)
            states.append(h)
        return torch.stack(states).transpose(1, 2)

    return call


def _dense_steps(problem: RecurrentLayer, inputs: Sequence[Any], device: str) -> Call:
    weight = _dense(problem, inputs, device)
    return _step_loop(problem, _named(problem, inputs, device), lambda h: weight @ h)


def _csr_steps(problem: RecurrentLayer, inputs: Sequence[Any], device: str) -> Call:
    import warnings

    given = _named(problem, inputs, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        weight = _dense(problem, inputs, device).to_sparse_csr()
    return _step_loop(problem, given, lambda h: weight @ h)


def called(
    problem: RecurrentLayer,
    inputs: Sequence[Any],
    convert: Callable[[Any], Any],
    call: Callable[..., Any],
    weights: Any,
) -> Call:
    """A public call with a problem's inputs."""
    given = _converted(problem, inputs, convert)
    return lambda: call(weights, **given, cell=problem.cell)


def ours(problem: SparseRecurrent, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    weights = RecurrentWeights(problem.hidden, problem.gates, problem.dtype, *inputs[:3])
    asked = problem_of(weights, problem.steps, problem.batch, problem.cell, problem.ragged, problem.resets)
    return called(problem, inputs, convert, sparse_recurrent, weights), asked


DENSE_PEERS = (
    Peer("torch layer (cuDNN on a GPU), with its input product", "torch", BOTH, _torch_layer),
    Peer("torch dense steps (cuBLAS)", "torch", BOTH, _dense_steps),
)
PEERS = (*DENSE_PEERS, Peer("torch CSR steps (cuSPARSE)", "torch", BOTH, _csr_steps))

"""Pruning of weights: by magnitude, with equal numbers of entries in every row, or in whole blocks; at once, or in
training.

Masks and pruned weights are in the weight's library, NumPy or PyTorch, and on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.given import described, integer
from ..runtime import arrays
from .libraries import library

METHODS = ("magnitude", "row_balanced", "block")
# Default rows and columns of a block: the middle of the sizes of block-sparse formats.
BLOCK = 16

# The density to prune to after a step of training; None: the pattern does not change.
Schedule = Callable[[int], float | None]


def pruning_mask(weight: Any, density: float, *, method: str = "magnitude", block: int = BLOCK, gates: int = 1) -> Any:
    """The mask of the entries of a weight that pruning keeps.

    Parameters
    ----------
    weight
        `(rows, columns)` torch tensor or NumPy array of floats, without NaN; for all gates of a recurrent layer
        `(gates * hidden, hidden)`.
    density
        Share of the entries that is kept, 0 <= density <= 1, rounded to a whole number of entries (per row) or blocks.
    method
        `"magnitude"`: the entries with the largest magnitude in the whole matrix (naive pruning; gates and rows get
        unequal shares). `"row_balanced"`: those with the largest magnitude in each row, the same number in every row.
        `"block"`: whole blocks, those with the largest mean square. Among equals the first is kept.
    block
        Rows and columns of a block. Blocks at the edges may be smaller.
    gates
        For a recurrent weight `(gates * hidden, hidden)`: a block contains the rows of its units from every gate, like
        the kernels' tiles for tensor cores. 1: gates are not distinguished. Other methods ignore it.

    Returns
    -------
    mask
        `(rows, columns)` of bool.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, naming them.

    Notes
    -----
    Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs", appendix B (naive and row-balanced).
    """
    xp = library("weight", weight)
    known = arrays.facts("weight", weight)
    if len(known.shape) != 2 or not known.dtype.startswith(("float", "bfloat")):
        raise ValueError(f"weight: expected two dimensions of floats, got shape {known.shape} and dtype {known.dtype}")
    density = _checked_density("density", density)
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if integer("block", block) < 1:
        raise ValueError(f"block: expected at least 1, got {block}")
    if integer("gates", gates) < 1 or known.shape[0] % gates:
        raise ValueError(f"gates: expected a divisor of the {known.shape[0]} rows of the weight, got {gates}")
    rows, columns = known.shape
    scores = weight.detach() if arrays.is_torch(weight) else weight
    # Sixteen bits are compared as float32, since sums of squares may overflow.
    scores = abs(scores if known.dtype == "float64" else xp.cast(scores, "float32"))
    if bool(xp.isnan(scores).any()):
        raise ValueError("weight: expected no NaN, which has no magnitude")
    if not rows or not columns:
        return scores > 0
    if method == "magnitude":
        return _largest(scores.reshape(1, -1), round(density * rows * columns)).reshape(rows, columns)
    if method == "row_balanced":
        return _largest(scores, round(density * columns))
    units = rows // gates
    down, across = -(-units // block), -(-columns // block)
    shape = gates, down * block, across * block
    # Divided by their own number of entries, since blocks at the edges may have fewer.
    padded, entries = (xp.full(shape, 0.0, "float32", scores) for _ in range(2))
    # Scaled by the largest, so that squares neither overflow nor vanish.
    most = scores.max()
    scaled = scores / xp.where(most > 0, most, most * 0 + 1)
    padded[:, :units, :columns] = scaled.reshape(gates, units, columns) ** 2
    entries[:, :units, :columns] = 1
    of_blocks = [part.sum(0).reshape(down, block, across, block).sum(3).sum(1) for part in (padded, entries)]
    kept = _largest((of_blocks[0] / of_blocks[1]).reshape(1, -1), round(density * down * across))
    spread = kept.reshape(down, 1, across, 1) & (entries.reshape(gates, down, block, across, block) > 0)
    return spread.reshape(shape)[:, :units, :columns].reshape(rows, columns)


def prune(weight: Any, density: float, *, method: str = "magnitude", block: int = BLOCK, gates: int = 1) -> Any:
    """A copy of the weight in which entries that `pruning_mask`, with the same parameters, does not keep are zero."""
    mask = pruning_mask(weight, density, method=method, block=block, gates=gates)
    own, xp = weight.detach() if arrays.is_torch(weight) else weight, library("weight", weight)
    return xp.where(mask, own, xp.full((1, 1), 0.0, arrays.facts("weight", weight).dtype, own))


def _largest(scores: Any, count: int) -> Any:
    """A mask of the `count` largest entries of each row, the first ones among equals."""
    if count in (0, scores.shape[1]):
        return (scores >= 0) if count else (scores < 0)
    edge = library("scores", scores).kth_largest(scores, count)[:, None]
    above, equal = scores > edge, scores == edge
    wanted = (count - above.sum(1))[:, None]
    if bool((equal.sum(1)[:, None] > wanted).any()):
        equal = equal & (equal.cumsum(1) <= wanted)
    return above | equal


def _checked_density(name: str, density: Any) -> float:
    try:
        density = float(density)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {type(density).__name__}") from None
    if not 0 <= density <= 1:
        raise ValueError(f"{name}: expected 0 <= {name} <= 1, got {density}")
    return density


# ---- in training ---------------------------------------------------------------------------------


def cubic_schedule(final: float, *, begin: int, end: int, every: int = 100, initial: float = 1.0) -> Schedule:
    """A density that decreases fast at first and slowly at the end.

    With sparsity s = 1 - density, at t = begin, begin + every, ..., end:

        s_t = s_final + (s_initial - s_final) (1 - (t - begin) / (end - begin))^3

    Steps are counted from 1; in between, and after `end`, the pattern does not change.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, naming them.

    Notes
    -----
    Source: Zhu & Gupta 2017, "To prune, or not to prune", equation 1.
    """
    final, initial = _checked_density("final", final), _checked_density("initial", initial)
    begin, end, every = _checked_steps(begin, end, every)
    if final > initial:
        raise ValueError(f"final: expected at most the initial density ({initial}), got {final}")

    def density(step: int) -> float | None:
        if not begin <= step <= end or ((step - begin) % every and step != end):
            return None
        left = (end - step) / (end - begin) if end > begin else 0.0
        return final + (initial - final) * left**3

    return density


def constant_schedule(final: float, *, begin: int, end: int, every: int) -> Schedule:
    """The final density from the first pruning on, with a new pattern at `begin`, `begin + every`, ... up to `end`.

    With half an epoch for `begin` and `every`, `end` some epochs before the last, and a master copy of the weights,
    this is the training of Zhu, Pool et al. 2018, appendix B. Steps are counted from 1.
    """
    final = _checked_density("final", final)
    begin, end, every = _checked_steps(begin, end, every)
    return lambda step: final if begin <= step <= end and not (step - begin) % every else None


def _checked_steps(begin: Any, end: Any, every: Any) -> tuple[int, int, int]:
    begin, end, every = integer("begin", begin), integer("end", end), integer("every", every)
    if begin < 1 or every < 1 or end < begin:
        raise ValueError(
            f"begin, end, every: expected 1 <= begin <= end and every >= 1, got {begin}, {end} and {every}"
        )
    return begin, end, every


class GradualPruning:
    """Prunes weights while they are trained, as a callback of a torch training loop.

        pruning = GradualPruning(model.rnn, cubic_schedule(0.1, begin=100, end=1000)).attach(optimizer)
        ...  # the loop, as it was
        pruning.detach()

    Parameters
    ----------
    target
        A `torch.nn.RNN`, `LSTM` or `GRU`, or a module that contains some: their recurrent weights (`weight_hh_l...`)
        are pruned. Or any iterable of two-dimensional parameters.
    schedule
        `schedule(step)` is the density to prune to after the step, counted from 1, or None to keep the pattern.
        `cubic_schedule` and `constant_schedule` make such functions.
    method, block, gates
        As in `pruning_mask`; the default of `gates` is that of the module for its weights, and 1 for other parameters.
    master
        Whether to train a master copy of the unpruned weights: the pruned weights are used in the forward and backward
        pass, the optimiser's step changes the master copy, and pruned weights may return at the next pruning (Zhu, Pool
        et al. 2018, appendix B). Otherwise pruned weights stay zero (Zhu & Gupta 2017).

    Attributes
    ----------
    step
        Number of the optimiser's steps so far.
    masks
        The patterns by the parameter's index; empty before the first pruning.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, naming them.

    Notes
    -----
    Without `attach`, call `before_step()` and `after_step()` around the optimiser's step. `state_dict` and
    `load_state_dict` resume a run; they identify parameters by their order.
    """

    def __init__(
        self,
        target: Any,
        schedule: Schedule,
        *,
        method: str = "magnitude",
        block: int = BLOCK,
        gates: int | None = None,
        master: bool = False,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if not callable(schedule):
            raise TypeError(f"schedule: expected a function of the step, got {type(schedule).__name__}")
        self.parameters = _recurrent_weights(target)
        self.schedule, self.method, self.block = schedule, method, block
        of_module = hasattr(target, "named_parameters")
        self.gates = [
            gates if gates is not None else p.shape[0] // p.shape[1] if of_module else 1 for p in self.parameters
        ]
        self.step = 0
        self.masks: dict[int, Any] = {}
        self._master = master
        self._masters: dict[int, Any] = {}
        self._hooks: list[Any] = []

    @property
    def density(self) -> float:
        """Share of entries that are not masked, over all weights."""
        total = sum(parameter.numel() for parameter in self.parameters)
        kept = sum(
            int(self.masks[i].sum()) if i in self.masks else parameter.numel()
            for i, parameter in enumerate(self.parameters)
        )
        return kept / total if total else math.nan

    def attach(self, optimizer: Any) -> GradualPruning:
        """Register `before_step` and `after_step` as hooks of the optimiser's steps. Returns itself."""
        self.detach()
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]
        return self

    def detach(self) -> None:
        """Remove the hooks from the optimiser. The weights stay pruned."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def before_step(self) -> None:
        """With a master copy: put it into the parameters, for the optimiser to change."""
        for i, unpruned in self._masters.items():
            self.parameters[i].detach().copy_(unpruned)

    def after_step(self) -> None:
        """Count the step, make a new pattern if the schedule says so, and zero pruned weights."""
        self.step += 1
        density = self.schedule(self.step)
        for i, parameter in enumerate(self.parameters):
            own = parameter.detach()  # changed in place, so that the module's other views of its storage see it
            if i in self.masks and not self._master:
                own.masked_fill_(~self.masks[i], 0)  # discards the optimiser's updates of pruned weights
            if density is not None:
                options: dict[str, Any] = {"method": self.method, "block": self.block, "gates": self.gates[i]}
                self.masks[i] = pruning_mask(own, density, **options)
            if i in self.masks:
                if self._master:
                    self._masters[i] = own.clone()
                own.masked_fill_(~self.masks[i], 0)

    def state_dict(self) -> dict[str, Any]:
        """Step, patterns and master copies, for `load_state_dict`."""
        return {"step": self.step, "masks": dict(self.masks), "masters": dict(self._masters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, on the devices of the parameters.

        Raises
        ------
        ValueError
            If it belongs to other parameters.
        """
        for name in ("masks", "masters"):
            for i, array in state[name].items():
                if i >= len(self.parameters) or array.shape != self.parameters[i].shape:
                    raise ValueError(f"state: {name}[{i}] fits no parameter, shape {tuple(array.shape)}")
        place = {i: parameter.device for i, parameter in enumerate(self.parameters)}
        self.step = integer("step", state["step"])
        self.masks = {i: array.to(place[i]) for i, array in state["masks"].items()}
        self._masters = {i: array.to(place[i]) for i, array in state["masters"].items()}


def _recurrent_weights(target: Any) -> list[Any]:
    """The parameters to prune."""
    if hasattr(target, "named_parameters") and not isinstance(target, type):
        found = [
            parameter
            for name, parameter in target.named_parameters()
            if name.rpartition(".")[2].startswith("weight_hh_l")
        ]
        if not found:
            raise TypeError(f"target: expected a module with recurrent weights, got {type(target).__name__}")
        return found
    if not isinstance(target, Iterable) or isinstance(target, (str, bytes)) or hasattr(target, "shape"):
        raise TypeError(f"target: expected a module or a list of parameters, got {described(target)}")
    found = list(target)
    if not found:
        raise TypeError(f"target: expected a module or at least one parameter, got none in a {type(target).__name__}")
    for i, parameter in enumerate(found):
        if not arrays.is_torch(parameter) or parameter.dim() != 2:
            raise TypeError(f"target: expected two-dimensional torch parameters, got {type(parameter).__name__} at {i}")
    return found

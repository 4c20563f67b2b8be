"""Optimisers of other libraries as strategies: Optuna's and Nevergrad's, from the extra `lab`.

They search boxes, with a range of numbers for each decision; a problem here has several templates with different
decisions, and points that are not allowed. So the axes of a box are the template, and for each decision the index of
its value in the table. The measured point is the one nearest to what the optimiser proposes: of the same template,
allowed, and not measured before. Its time is reported for the proposed position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from ..core.candidate import Candidate
from .domain import Domain

# Value of a failure, added to the worst ln(seconds) so far.
PENALTY = math.log(2.0)


class Optimiser(Protocol):
    """A library's optimiser of a box with axes of these sizes; the first axis is the template."""

    def ask(self) -> tuple[Any, Sequence[int]]:
        """A position, and the token by which its value is told."""

    def tell(self, token: Any, value: float) -> None:
        """Report the value of a position; smaller is better."""


class AskTell:
    """A library's optimiser as a `strategies.Strategy`."""

    predicted: Mapping[Candidate, float] = MappingProxyType({})  # libraries do not show their predictions

    def __init__(
        self, name: str, domain: Domain, *, known: Mapping[Candidate, float | None], trials: int, batch: int, seed: int
    ) -> None:
        import numpy as np

        self._domain, self._batch = domain, batch
        self._worst = max((math.log(s) for s in known.values() if s), default=-math.inf)
        self._asked: dict[Candidate, Any] = {}
        axes = list(dict.fromkeys(decision for table in domain.tables.values() for decision in table))
        # The position of each point in the box; -1 on axes that its template lacks, which then do not count.
        self._places = np.full((len(domain.points), 1 + len(axes)), -1)
        templates = list(domain.tables)
        for number, point in enumerate(domain.points):
            self._places[number, 0] = templates.index(point.template)
            for decision, value in point.decisions:
                table = domain.tables[point.template]
                self._places[number, 1 + axes.index(decision)] = table[decision].index(value)
        self._sizes = self._places.max(axis=0) + 1
        self._left = np.array([point not in known for point in domain.points])
        self._random = np.random.default_rng(seed)
        self._optimiser = LIBRARIES[name]([int(size) for size in self._sizes], trials, batch, seed)

    def propose(self) -> list[Candidate]:
        """The next batch, in which each position is proposed without knowing the others' times."""
        proposed: list[Candidate] = []
        while len(proposed) < self._batch and self._left.any():
            token, place = self._optimiser.ask()
            number = self._nearest(place)
            self._left[number] = False
            proposed.append(self._domain.points[number])
            self._asked[proposed[-1]] = token
        return proposed

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """Tell the optimiser the values of its proposals."""
        self._worst = max([self._worst, *(math.log(s) for s in results.values() if s)])
        failed = (self._worst if math.isfinite(self._worst) else 0.0) + PENALTY
        for candidate, seconds in results.items():
            self._optimiser.tell(self._asked.pop(candidate), math.log(seconds) if seconds else failed)

    def _nearest(self, place: Sequence[int]) -> int:
        """The nearest unmeasured point: distances are in shares of the axes' lengths, and another template counts more
        than all.
        """
        import numpy as np

        away = np.abs(self._places - np.array(place)) / np.maximum(self._sizes - 1, 1)
        away[self._places < 0] = 0.0
        away[:, 0] = np.where(self._places[:, 0] == place[0], 0.0, len(self._sizes))
        away = away.sum(axis=1) + self._random.random(len(away)) * 1e-6  # random choice among equally near ones
        return int(np.where(self._left, away, np.inf).argmin())


class Optuna:
    """A sampler of Optuna."""

    def __init__(self, sampler: Callable[[Any, int, int], Any], sizes: Sequence[int], batch: int, seed: int) -> None:
        import warnings

        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experimental features
            self._study = optuna.create_study(sampler=sampler(optuna.samplers, batch, seed))
        # Templates have no order, values have one.
        made = optuna.distributions
        self._space: dict[str, Any] = {"0": made.CategoricalDistribution(list(range(sizes[0])))}
        self._space |= {str(axis): made.IntDistribution(0, size - 1) for axis, size in enumerate(sizes) if axis}

    def ask(self) -> tuple[Any, Sequence[int]]:
        trial = self._study.ask(self._space)
        return trial, [trial.params[axis] for axis in self._space]

    def tell(self, token: Any, value: float) -> None:
        self._study.tell(token, value)


class Nevergrad:
    """An optimiser from Nevergrad's registry."""

    def __init__(self, name: str, sizes: Sequence[int], trials: int, batch: int, seed: int) -> None:
        import nevergrad
        import numpy as np

        axes = [
            nevergrad.p.TransitionChoice(range(size)) if axis else nevergrad.p.Choice(range(size))
            for axis, size in enumerate(sizes)
        ]
        space = nevergrad.p.Tuple(*axes)
        space.random_state = np.random.RandomState(seed)
        self._optimizer = nevergrad.optimizers.registry[name](space, budget=trials, num_workers=batch)

    def ask(self) -> tuple[Any, Sequence[int]]:
        asked = self._optimizer.ask()
        return asked, asked.value

    def tell(self, token: Any, value: float) -> None:
        self._optimizer.tell(token, value)


def _optuna(sampler: Callable[[Any, int, int], Any]) -> Callable[..., Optimiser]:
    return lambda sizes, trials, batch, seed: Optuna(sampler, sizes, batch, seed)


def _nevergrad(name: str) -> Callable[..., Optimiser]:
    return lambda sizes, trials, batch, seed: Nevergrad(name, sizes, trials, batch, seed)


LIBRARIES: dict[str, Callable[..., Optimiser]] = {
    "tpe": _optuna(
        lambda samplers, batch, seed: samplers.TPESampler(
            seed=seed, n_startup_trials=batch, multivariate=True, constant_liar=True
        )
    ),
    "bayes": _optuna(lambda samplers, batch, seed: samplers.GPSampler(seed=seed, n_startup_trials=batch)),
    "qmc": _optuna(lambda samplers, batch, seed: samplers.QMCSampler(seed=seed, scramble=True)),
    "genetic": _nevergrad("DiscreteLenglerOnePlusOne"),
    "portfolio": _nevergrad("PortfolioDiscreteOnePlusOne"),
}
"""By the name of a strategy, what makes its optimiser of the sizes of the axes, trials, batch and seed."""

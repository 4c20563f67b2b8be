"""Optimisers of libraries as strategies: Optuna, scikit-optimize and Nevergrad, of the extra `lab`.

They know boxes, a space of one range a decision; ours have several templates, each with decisions of its own, and
points that are not allowed. So a box has the template and the places of all decisions' values in their tables; what a
template does not have is ignored. A point that is not allowed is told to the optimiser as a bad one, and one that is
known as what it was; both cost no trial. An optimiser that names nothing new for long is helped by a random point.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from ..core.candidate import Candidate
from .domain import Domain

# Asked so often for one trial, an optimiser has run dry.
ATTEMPTS = 30
# Above the worst ln(seconds) so far: what a failure, or a point that is not allowed, is worth.
PENALTY = math.log(2.0)
Place = Mapping[str, int]  # of each axis of the box


class Optimiser(Protocol):
    """A library's, for the axes of a box: their sizes by name, the first of which is the template's."""

    def ask(self) -> tuple[Any, Place]: ...

    def tell(self, token: Any, value: float | None) -> None:
        """The value of what was asked for; None drops it."""


class AskTell:
    """A library's optimiser of this name as a `strategies.Strategy`."""

    predicted: Mapping[Candidate, float] = MappingProxyType({})  # libraries keep what they think to themselves

    def __init__(
        self, name: str, domain: Domain, *, known: Mapping[Candidate, float | None], trials: int, batch: int, seed: int
    ) -> None:
        self._domain, self._batch = domain, batch
        self._known: dict[Candidate, float | None] = dict(known)
        self._random = random.Random(seed)
        self._names = list(domain.tables)
        self._worst = max((math.log(s) for s in known.values() if s), default=0.0)
        self._tokens: dict[Candidate, Any] = {}
        axes = {"template": len(self._names)}
        for table in domain.tables.values():
            for decision, values in table.items():
                axes[decision] = max(axes.get(decision, 1), len(values))
        self._optimiser = LIBRARIES[name]({n: size for n, size in axes.items() if size > 1}, trials, batch, seed)

    def propose(self) -> list[Candidate]:
        """The next batch, each asked for without the others' times."""
        self._tokens = {}
        for _ in range(self._batch):
            for _ in range(ATTEMPTS):
                token, place = self._optimiser.ask()
                candidate = self._at(place)
                if candidate is None:
                    self._optimiser.tell(token, self._worst + PENALTY)
                elif candidate in self._known:
                    self._optimiser.tell(token, self._value(self._known[candidate]))
                elif candidate in self._tokens:
                    self._optimiser.tell(token, None)
                else:
                    self._tokens[candidate] = token
                    break
            else:
                left = [p for p in self._domain.points if p not in self._known and p not in self._tokens]
                if not left:
                    break
                self._tokens[self._random.choice(left)] = None
        return list(self._tokens)

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """Tell the optimiser what it asked for."""
        self._known.update(results)
        self._worst = max(
            [self._worst if len(self._known) > len(results) else -math.inf]
            + [math.log(s) for s in results.values() if s]
        )
        for candidate, token in self._tokens.items():
            if token is not None:
                self._optimiser.tell(token, self._value(results[candidate]) if candidate in results else None)

    def _value(self, seconds: float | None) -> float:
        return math.log(seconds) if seconds else self._worst + PENALTY

    def _at(self, place: Place) -> Candidate | None:
        name = self._names[place.get("template", 0)]
        decisions = {}
        for decision, values in self._domain.tables[name].items():
            number = place.get(decision, 0)
            if number >= len(values):
                return None
            decisions[decision] = values[number]
        return self._domain.candidate(name, decisions)


class Optuna:
    """A sampler of Optuna."""

    def __init__(self, sampler: Callable[[Any, int, int], Any], axes: Mapping[str, int], batch: int, seed: int) -> None:
        import warnings

        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is experimental there
            self._study = optuna.create_study(sampler=sampler(optuna.samplers, batch, seed))
        # Templates have no order, values have one.
        self._space: dict[str, Any] = {
            name: optuna.distributions.CategoricalDistribution(list(range(size)))
            if name == "template"
            else optuna.distributions.IntDistribution(0, size - 1)
            for name, size in axes.items()
        }

    def ask(self) -> tuple[Any, Place]:
        trial = self._study.ask(self._space)
        return trial, trial.params

    def tell(self, token: Any, value: float | None) -> None:
        if value is None:
            from optuna.trial import TrialState

            self._study.tell(token, state=TrialState.FAIL)
        else:
            self._study.tell(token, value)


class Skopt:
    """A surrogate of scikit-optimize: it is fitted when a batch is through, and asked for a batch at once."""

    def __init__(self, surrogate: str, axes: Mapping[str, int], batch: int, seed: int) -> None:
        from skopt import Optimizer
        from skopt.space import Categorical, Integer

        self._axes = list(axes)
        space = [
            Categorical(range(size)) if name == "template" else Integer(0, size - 1) for name, size in axes.items()
        ]
        self._optimizer = Optimizer(
            space, base_estimator=surrogate, n_initial_points=batch, acq_func="EI", random_state=seed
        )
        self._told: list[tuple[Sequence[int], float]] = []

    def ask(self) -> tuple[Any, Place]:
        if self._told:
            places, values = zip(*self._told, strict=True)
            self._told = []
            self._optimizer.tell(list(places), list(values))
        place = [int(number) for number in self._optimizer.ask()]
        return place, dict(zip(self._axes, place, strict=True))

    def tell(self, token: Any, value: float | None) -> None:
        if value is not None:
            self._told.append((token, value))


class Nevergrad:
    """An optimiser of Nevergrad's registry."""

    def __init__(self, name: str, axes: Mapping[str, int], trials: int, batch: int, seed: int) -> None:
        import warnings

        import nevergrad
        import numpy as np

        warnings.filterwarnings("ignore", module="nevergrad")
        choices = {
            axis: nevergrad.p.Choice(range(size)) if axis == "template" else nevergrad.p.TransitionChoice(range(size))
            for axis, size in axes.items()
        }
        space = nevergrad.p.Dict(**choices)
        space.random_state = np.random.RandomState(seed)
        self._optimizer = nevergrad.optimizers.registry[name](space, budget=trials, num_workers=batch)

    def ask(self) -> tuple[Any, Place]:
        asked = self._optimizer.ask()
        return asked, asked.value

    def tell(self, token: Any, value: float | None) -> None:
        if value is not None:
            self._optimizer.tell(token, value)


def _optuna(sampler: Callable[[Any, int, int], Any]) -> Callable[..., Optimiser]:
    return lambda axes, trials, batch, seed: Optuna(sampler, axes, batch, seed)


def _skopt(surrogate: str) -> Callable[..., Optimiser]:
    return lambda axes, trials, batch, seed: Skopt(surrogate, axes, batch, seed)


def _nevergrad(name: str) -> Callable[..., Optimiser]:
    return lambda axes, trials, batch, seed: Nevergrad(name, axes, trials, batch, seed)


LIBRARIES: dict[str, Callable[..., Optimiser]] = {
    "tpe": _optuna(
        lambda samplers, batch, seed: samplers.TPESampler(
            seed=seed, n_startup_trials=batch, multivariate=True, constant_liar=True
        )
    ),
    "bayes": _optuna(lambda samplers, batch, seed: samplers.GPSampler(seed=seed, n_startup_trials=batch)),
    "qmc": _optuna(lambda samplers, batch, seed: samplers.QMCSampler(seed=seed, scramble=True)),
    "forest": _skopt("ET"),
    "genetic": _nevergrad("DiscreteLenglerOnePlusOne"),
    "portfolio": _nevergrad("PortfolioDiscreteOnePlusOne"),
}
"""By the name of a strategy, what makes its optimiser of the axes, trials, batch and seed."""

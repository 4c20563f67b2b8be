"""Search strategies, by name, which choose the candidates to measure next; all have the same two methods.

`evolutionary` and `replay` are MetaSchedule's (`search`), `random` draws without replacement, `boosting` ranks all
points with XGBoost's trees. The others are optimisers of other libraries, for studies (`ask_tell`, extra `lab`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ..core.candidate import Candidate
from .domain import Domain

if TYPE_CHECKING:
    import numpy as np

DEFAULT = "evolutionary"
"""What `tune` takes: docs/simulated-search.md says why."""


class Strategy(Protocol):
    """The interface of a strategy.

    Attributes
    ----------
    predicted
        The predictions of the strategy's model for the last proposals, larger meaning faster; empty without a fitted
        model. Trials record them.
    """

    @property
    def predicted(self) -> Mapping[Candidate, float]: ...

    def propose(self) -> list[Candidate]:
        """The next candidates, neither known nor proposed before; empty when no point is left."""

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """Report median seconds of proposed candidates; None for a failure."""


class Maker(Protocol):
    def __call__(
        self, domain: Domain, *, known: Mapping[Candidate, float | None], trials: int, batch: int, seed: int
    ) -> Strategy: ...


def make(
    name: str, domain: Domain, *, known: Mapping[Candidate, float | None], trials: int, batch: int, seed: int
) -> Strategy:
    """Make a strategy for a domain.

    Parameters
    ----------
    name
        One of `NAMES`.
    known
        Candidates measured before, with their median seconds (None: failed). They are never proposed again.
    trials
        Number of points that will be measured. If they suffice for the whole domain, the order does not matter.
    batch
        Number of points that are proposed at a time, and reported together. Others may be proposed in between.

    Raises
    ------
    ModuleNotFoundError
        If the strategy's library is not installed.
    """
    if sum(point not in known for point in domain.points) <= trials:
        name = "random"
    return _makers()[name](domain, known=known, trials=trials, batch=batch, seed=seed)


def _evolutionary(domain: Domain, **options: object) -> Strategy:
    from .search import Search

    return Search(domain, **options)  # type: ignore[arg-type]


def _replay(domain: Domain, **options: object) -> Strategy:
    from .search import Search

    return Search(domain, replay=True, **options)  # type: ignore[arg-type]


def _library(name: str) -> Maker:
    def made(domain: Domain, **options: object) -> Strategy:
        from .ask_tell import AskTell

        return AskTell(name, domain, **options)  # type: ignore[arg-type]

    return made


class Random:
    """Every point once, in random order."""

    predicted: Mapping[Candidate, float] = MappingProxyType({})

    def __init__(
        self, domain: Domain, *, known: Mapping[Candidate, float | None], trials: int, batch: int, seed: int
    ) -> None:
        self._left = [point for point in domain.points if point not in known]
        self._batch = batch
        random.Random(seed).shuffle(self._left)

    def propose(self) -> list[Candidate]:
        """The next points of the order."""
        batch, self._left = self._left[: self._batch], self._left[self._batch :]
        return batch

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """Do nothing."""


class Boosting:
    """Ranks all remaining points with gradient-boosted trees, fitted to the measurements.

    Their features are a point's decisions and the domain's prior. Before there are measurements to fit, half of a batch
    are the best points by the prior, and the others are drawn at random, equally from all templates.

    The trees predict ln(seconds); a failure counts as `FAILED` times the slowest. A batch is shared by `MODELS` models,
    fitted to different bootstrap samples of the measurements, each of which contributes the points that it predicts to
    be fastest. One point in `EXPLORED` is drawn at random.
    """

    MODELS, EXPLORED, FAILED, ROUNDS, LEAST = 4, 8, 2.0, 60, 8
    PARAMETERS = {
        "objective": "reg:squarederror",
        "max_depth": 5,
        "eta": 0.15,
        "min_child_weight": 1,
        "colsample_bynode": 0.7,
        "tree_method": "hist",
        "nthread": 1,
    }

    def __init__(
        self, domain: Domain, *, known: Mapping[Candidate, float | None], trials: int, batch: int, seed: int
    ) -> None:
        self._domain, self._batch = domain, batch
        self._random = random.Random(seed)
        self._known = dict(known)
        self._proposed = set(known)
        self.predicted: Mapping[Candidate, float] = {}

    def propose(self) -> list[Candidate]:
        """The best points by the prior, then by the models."""
        import numpy as np

        left = self._left()
        taught = [(point, seconds) for point, seconds in self._known.items() if point in self._domain.index]
        chosen: list[int] = []
        said: dict[int, float] = {}
        if len(taught) >= max(self._batch, self.LEAST):
            rows = self._domain.rows[left]
            found = self._predictions(taught, rows)
            turns = [np.array(left)[order] for order in np.argsort(found, axis=1)]
            for slot in range(min(self._batch - self._batch // self.EXPLORED, len(left))):
                chosen.append(next(int(n) for n in turns[slot % self.MODELS] if n not in chosen))
            said = dict(zip(left, map(float, -found.mean(axis=0)), strict=True))
        elif self._domain.prior is not None:
            hoped = [-float(value) for value in self._domain.prior[left]]
            said = dict(zip(left, hoped, strict=True))
            chosen = sorted(left, key=lambda number: -said[number])[: self._batch // 2]
        chosen += [n for n in left if n not in chosen][: self._batch - len(chosen)]
        self.predicted = {self._domain.points[n]: said[n] for n in chosen} if said else {}
        proposed = [self._domain.points[number] for number in chosen]
        self._proposed.update(proposed)
        return proposed

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """Store the results."""
        self._known.update(results)

    def _left(self) -> list[int]:
        """The points that are neither known nor proposed, in random order, alternating between templates."""
        decks: dict[str, list[int]] = {name: [] for name in self._domain.tables}
        for number, point in enumerate(self._domain.points):
            if point not in self._proposed:
                decks[point.template].append(number)
        for deck in decks.values():
            self._random.shuffle(deck)
        rounds = itertools.zip_longest(*decks.values())
        return [number for dealt in rounds for number in dealt if number is not None]

    def _predictions(self, taught: list[tuple[Candidate, float | None]], rows: np.ndarray) -> np.ndarray:
        import numpy as np
        import xgboost

        worst = max((seconds for _, seconds in taught if seconds), default=1.0)
        labels = np.log([seconds or worst * self.FAILED for _, seconds in taught])
        features = self._domain.rows[[self._domain.index[point] for point, _ in taught]]
        found = []
        for _ in range(self.MODELS):
            draw = [self._random.randrange(len(taught)) for _ in taught]
            data = xgboost.DMatrix(features[draw], label=labels[draw])
            seeded = {**self.PARAMETERS, "seed": self._random.randrange(1 << 30), "base_score": float(labels.mean())}
            found.append(xgboost.train(seeded, data, self.ROUNDS).inplace_predict(rows))
        return np.array(found)


def _makers() -> dict[str, Callable[..., Strategy]]:
    from .ask_tell import LIBRARIES

    own: dict[str, Callable[..., Strategy]] = {
        "evolutionary": _evolutionary,
        "replay": _replay,
        "random": Random,
        "boosting": Boosting,
    }
    return {**own, **{name: _library(name) for name in LIBRARIES}}


def names() -> list[str]:
    """Names of the strategies; those of other libraries need the extra `lab`."""
    return list(_makers())

"""MetaSchedule's search over our templates.

Every template of a problem becomes a design space: a placeholder function on whose trace its decisions are drawn with
`sample_categorical` and written down as annotations. The evolutionary search mutates those decisions and ranks
candidates with its XGBoost model; what it proposes is read back from the annotations and built by the template. So
schedules and generated kernels are searched alike. Three parts of MetaSchedule are replaced, because they know only
tiles, vectors and unrolling (`MutateDecision`), only the loops of the program at hand (`DecisionFeatures`), and
nothing of restrictions between decisions (`RejectRestricted`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.candidate import Candidate
from ..core.template import Table
from .domain import Domain

# The stock population of 512 is for spaces of billions of points; ours have hundreds to tens of thousands.
POPULATION = 128
# Replayed traces that were drawn before count for MetaSchedule: it may draw so many for each trial.
REPLAY_DRAWS = 100
MARK = "tvm_sparse."


def decisions_of(module: Any) -> tuple[str, dict[str, int]]:
    """The template and the decisions that a placeholder's annotations stand for."""
    notes = {
        str(k)[len(MARK) :]: v for k, v in module["main"].body.block.annotations.items() if str(k).startswith(MARK)
    }
    return str(notes.pop("template")), {name: int(value) for name, value in notes.items()}


def prepare() -> None:
    """Before the first import of MetaSchedule: leave out every back end's tensor intrinsics, which take 10 s to import
    and which no space here uses."""
    if "tvm.s_tir.tensor_intrin" not in sys.modules:
        sys.modules["tvm.s_tir.tensor_intrin"] = types.ModuleType("tvm.s_tir.tensor_intrin")


def load() -> None:
    """Import what searches need, which takes seconds."""
    prepare()
    import xgboost  # noqa: F401
    from tvm.s_tir import meta_schedule  # noqa: F401


def placeholder(**attributes: str) -> Any:
    """A module with a function that computes next to nothing, and has these attributes: decisions are noted on it."""
    import tvm
    from tvm import te

    a = te.placeholder((1,), name="a")
    function = te.create_prim_func([a, te.compute((1,), lambda i: a[i], name="b")])
    for name, text in {"global_symbol": "main", **attributes}.items():
        function = function.with_attr(name, text)
    return tvm.IRModule({"main": function})


def drawn(module: Any, template: str, table: Table, values: Mapping[str, int] | None = None, **notes: str) -> Any:
    """A schedule of a placeholder whose trace draws each decision of a template: these values, or any.

    `notes` are written down beside the decisions. The trace ends with two instructions for each decision, one that
    draws it and one that writes it down.
    """
    from tvm.s_tir import Schedule

    schedule = Schedule(module)
    block = schedule.get_sblock("root")
    for name, text in {**notes, MARK + "template": template}.items():
        schedule.annotate(block, name, text)
    for decision, choices in table.items():
        weights = [1.0 / len(choices)] * len(choices)
        which = None if values is None else choices.index(values[decision])
        value = schedule.sample_categorical(list(choices), weights, decision=which)
        schedule.annotate(block, MARK + decision, value)
    return schedule


class Search:
    """MetaSchedule's searches: proposes batches of points, and learns from what is reported.

    Parameters
    ----------
    known
        Candidates measured before, with their median seconds (None: failed). They are never proposed again, and
        teach the cost model before the first proposal.
    replay
        Draw traces at random (`ReplayTrace`) in the place of the evolutionary search with its cost model.

    Attributes
    ----------
    predicted
        What the cost model says of the candidates that were proposed last, once it has been trained.
    """

    def __init__(
        self,
        domain: Domain,
        *,
        known: Mapping[Candidate, float | None],
        trials: int,
        batch: int,
        seed: int,
        replay: bool = False,
    ) -> None:
        self._known = dict(known)
        self.predicted: Mapping[Candidate, float] = {}
        self._mapped: dict[Candidate, Any] = {}
        draws = REPLAY_DRAWS * trials if replay else trials + len(known)
        self._meta = _MetaSchedule(domain, draws, batch, seed, replay)
        # Where a space has millions of combinations MetaSchedule makes up few that are allowed. What is listed then
        # fills the batches: what the prior hopes for, or else the neighbours of what is known first.
        self._batch = batch
        self._left = iter(domain.hoped() if domain.open else ())
        self._listed: set[Candidate] = set()  # of these the ones that were proposed
        self._meta.teach({c: s for c, s in known.items() if domain.candidate(c.template, c.values) == c})

    def propose(self) -> list[Candidate]:
        """As `Strategy.propose`; empty when the search has nothing left."""
        proposed = self._made_up()
        left = (one for one in self._left if one not in self._known and one not in self._mapped)
        listed = list(itertools.islice(left, max(self._batch - len(proposed), 0)))
        self._listed.update(listed)
        return proposed + listed

    def _made_up(self) -> list[Candidate]:
        """What MetaSchedule proposes and is not known."""
        while True:
            proposals = self._meta.generate()
            if not proposals:
                return []
            stale = {c: m for c, m in proposals.items() if c in self._known}
            new = {c: m for c, m in proposals.items() if c not in stale}
            fresh = {c: m for c, m in new.items() if c not in self._mapped and c not in self._listed}
            self._meta.pass_over([m for c, m in new.items() if c not in fresh])
            if stale:
                self._meta.notify(stale, [self._known[c] for c in stale])
            if fresh:
                self._mapped |= fresh
                self.predicted = self._meta.predict(fresh)
                return list(fresh)

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """As `Strategy.report`."""
        self._known.update(results)
        asked = {c: self._mapped.pop(c) for c in results if c in self._mapped}
        self._meta.notify(asked, [results[c] for c in asked])
        if listed := {c: seconds for c, seconds in results.items() if c in self._listed}:
            self._meta.teach(listed)


class _MetaSchedule:
    """The search strategy, cost model and in-memory database of one run."""

    def __init__(self, domain: Domain, trials: int, batch: int, seed: int, replay: bool) -> None:
        prepare()
        import logging

        from tvm.s_tir import meta_schedule as ms

        from ..artifacts.compile import target_of

        logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)
        self._module = placeholder()
        self._domain = domain
        self._random = random.Random(seed)
        self._ms = ms

        def spaces(schedule: Any) -> list[Any]:
            return [drawn(self._module, name, table) for name, table in domain.tables.items()]

        strategy = (
            ms.search_strategy.ReplayTrace(max_fail_count=REPLAY_DRAWS * batch)
            if replay
            else ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION, init_min_unmeasured=batch, genetic_max_fail_count=20
            )
        )
        self._context = ms.TuneContext(
            mod=self._module,
            target=target_of(domain.machine),
            space_generator=ms.space_generator.ScheduleFn(
                spaces,
                sch_rules=[],
                postprocs=[reject_restricted(domain)],
                mutator_probs={mutate_decision(domain.tables, seed): 1.0},
            ),
            search_strategy=strategy,
            num_threads=1,
            rand_state=seed + 1,
            logger=logging.getLogger("tvm.s_tir.meta_schedule.tvm_sparse"),
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._module)
        # A few hundred rows of a few numbers: on several threads training takes ten times as long as on one.
        self._model = ms.cost_model.XGBModel(
            extractor=decision_features(domain), num_warmup_samples=batch, num_tuning_cores=1
        )
        self._untold: list[tuple[Any, Any]] = []
        self._context.pre_tuning(trials, batch, database=self._database, cost_model=self._model)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """NumPy's global generator, of which the cost model draws scores before it is trained, at this run's seed."""
        import numpy as np

        state = np.random.get_state()
        np.random.seed(self._random.randrange(1 << 32))
        try:
            yield
        finally:
            np.random.set_state(state)

    def teach(self, known: Mapping[Candidate, float | None]) -> None:
        """Enter candidates of earlier runs, as if they had been measured in this one."""
        schedules = [drawn(self._module, c.template, self._domain.tables[c.template], c.values) for c in known]
        measured = [self._ms.MeasureCandidate(schedule, []) for schedule in schedules]
        self._learn(measured, list(known.values()), self._results(list(known.values())))

    def generate(self) -> dict[Candidate, Any]:
        with self._seeded():
            proposals = self._context.generate_measure_candidates() or []
        named = {self._domain.candidate(*decisions_of(p.sch.mod)): p for p in proposals}
        return {candidate: p for candidate, p in named.items() if candidate is not None}

    def predict(self, asked: Mapping[Candidate, Any]) -> dict[Candidate, float]:
        """The model's scores, the larger the better; empty before it has been trained, when they are random numbers."""
        if self._model.booster is None or self._model.data_size < self._model.num_warmup_samples:
            return {}
        scores = self._model.predict(self._context, list(asked.values()))
        return dict(zip(asked, map(float, scores), strict=True))

    def pass_over(self, proposed: Sequence[Any]) -> None:
        """Count as drawn what is being measured already; its time comes later."""
        if proposed:
            self._context.notify_runner_results(list(proposed), self._results([None] * len(proposed)))

    def notify(self, asked: Mapping[Candidate, Any], seconds: Sequence[float | None]) -> None:
        measured, results = list(asked.values()), self._results(seconds)
        self._context.notify_runner_results(measured, results)
        self._learn(measured, seconds, results)

    def _results(self, seconds: Sequence[float | None]) -> list[Any]:
        return [self._ms.runner.RunnerResult([s] if s else None, None if s else "failed") for s in seconds]

    def _learn(self, measured: Sequence[Any], seconds: Sequence[float | None], results: Sequence[Any]) -> None:
        """Tell the cost model and the database.

        The model trains at every update, and is not asked before it has samples enough: the first ones come together.
        """
        self._untold += zip(measured, results, strict=True)
        if self._untold and self._model.data_size + len(self._untold) >= self._model.num_warmup_samples:
            self._model.update(self._context, *map(list, zip(*self._untold, strict=True)))
            self._untold.clear()
        for one, s in zip(measured, seconds, strict=True):
            if s:
                record = self._ms.database.TuningRecord(one.sch.trace, self._workload, [s], self._context.target, [])
                self._database.commit_tuning_record(record)


def mutate_decision(tables: Mapping[str, Table], seed: int) -> Any:
    """A mutator that draws one decision of a trace anew."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    # A trace of `drawn` begins with the block and its template; then each decision has two instructions.
    eligible = {
        name: [2 + 2 * i for i, choices in enumerate(table.values()) if len(choices) > 1]
        for name, table in tables.items()
    }

    @derived_object
    class MutateDecision(ms.mutator.PyMutator):
        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(seed)

        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, trace: Any, _: Any = None) -> Any:
            instructions = trace.insts
            draws = eligible[str(instructions[1].inputs[1])]
            if not draws:
                return None
            instruction = instructions[self.random.choice(draws)]
            old = int(trace.decisions[instruction])
            new = self.random.choice([v for v in range(len(instruction.attrs[0])) if v != old])
            return trace.with_decision(instruction, new, True)

        def clone(self) -> Any:
            return MutateDecision()

    return MutateDecision()


def reject_restricted(domain: Domain) -> Any:
    """A post-processor that refuses points which their template does not allow."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    @derived_object
    class RejectRestricted(ms.postproc.PyPostproc):
        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, sch: Any) -> bool:
            return domain.candidate(*decisions_of(sch.mod)) is not None

        def clone(self) -> Any:
            return RejectRestricted()

    return RejectRestricted()


def decision_features(domain: Domain) -> Any:
    """Features of a candidate: its row in the domain."""
    import numpy as np
    import tvm
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    @functools.cache
    def row(candidate: Candidate) -> Any:
        return tvm.runtime.tensor(np.array([domain.row(candidate)]))

    @derived_object
    class DecisionFeatures(ms.feature_extractor.PyFeatureExtractor):
        def extract_from(self, context: Any, candidates: list[Any]) -> list[Any]:
            rows = []
            for one in candidates:
                candidate = domain.candidate(*decisions_of(one.sch.mod))
                assert candidate is not None
                rows.append(row(candidate))
            return rows

    return DecisionFeatures()

"""MetaSchedule's search over this package's templates.

Every template of a problem becomes a design space: a placeholder function whose trace samples each decision with
`sample_categorical` and stores it as an annotation. The evolutionary search mutates those decisions and ranks
candidates with its XGBoost model; proposals are read back from the annotations and built by the template. So schedules
and generated kernels are searched alike. Three parts of MetaSchedule are replaced: its mutators change only tiles,
vectors and unrolling (see `MutateDecision`), its features describe only the program's loops (`DecisionFeatures`), and
it knows no restrictions between decisions (`RejectRestricted`).
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

# The stock population of 512 is meant for spaces of billions of points; those here have hundreds to tens of thousands.
POPULATION = 128
# MetaSchedule counts repeated draws of a trace as well: this is how many it may draw for each trial.
REPLAY_DRAWS = 100
MARK = "tvm_sparse."


def decisions_of(module: Any) -> tuple[str, dict[str, int]]:
    """The template and the decisions in a placeholder's annotations."""
    notes = {
        str(k)[len(MARK) :]: v for k, v in module["main"].body.block.annotations.items() if str(k).startswith(MARK)
    }
    return str(notes.pop("template")), {name: int(value) for name, value in notes.items()}


def prepare() -> None:
    """Skip the tensor intrinsics of all back ends, which take 10 s to import and which no space here uses. Call it
    before the first import of MetaSchedule.
    """
    if "tvm.s_tir.tensor_intrin" not in sys.modules:
        sys.modules["tvm.s_tir.tensor_intrin"] = types.ModuleType("tvm.s_tir.tensor_intrin")


def load() -> None:
    """Import the modules that searches need, which takes seconds."""
    prepare()
    import xgboost  # noqa: F401
    from tvm.s_tir import meta_schedule  # noqa: F401


def placeholder(**attributes: str) -> Any:
    """A module with a trivial function that has these attributes, on which decisions are annotated."""
    import tvm
    from tvm import te

    a = te.placeholder((1,), name="a")
    function = te.create_prim_func([a, te.compute((1,), lambda i: a[i], name="b")])
    for name, text in {"global_symbol": "main", **attributes}.items():
        function = function.with_attr(name, text)
    return tvm.IRModule({"main": function})


def drawn(module: Any, template: str, table: Table, values: Mapping[str, int] | None = None, **notes: str) -> Any:
    """A schedule of a placeholder whose trace samples each decision of a template: given values, or random ones.

    `notes` are annotated beside the decisions. The trace ends with two instructions for each decision, one that samples
    it and one that annotates it.
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
    """MetaSchedule's searches, which propose batches of points and learn from reported times.

    Parameters
    ----------
    known
        Candidates measured before, with their median seconds (None: failed). They are never proposed again, and train
        the cost model before the first proposal.
    replay
        Draw traces at random (`ReplayTrace`) instead of using the evolutionary search with its cost model.

    Attributes
    ----------
    predicted
        The cost model's predictions for the last proposals, once it has been trained.
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
        # In a space with millions of combinations few of MetaSchedule's proposals are allowed. Listed points then fill
        # the batches: those best by the prior, or else neighbours of known points first.
        self._batch = batch
        self._left = iter(domain.hoped() if domain.open else ())
        self._listed: set[Candidate] = set()  # those of the listed points that were proposed
        self._meta.teach({c: s for c, s in known.items() if domain.candidate(c.template, c.values) == c})

    def propose(self) -> list[Candidate]:
        """As `Strategy.propose`; empty when no point is left."""
        proposed = self._made_up()
        left = (one for one in self._left if one not in self._known and one not in self._mapped)
        listed = list(itertools.islice(left, max(self._batch - len(proposed), 0)))
        self._listed.update(listed)
        return proposed + listed

    def _made_up(self) -> list[Candidate]:
        """MetaSchedule's proposals that are not known."""
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
        # A few hundred rows of a few numbers: training takes ten times as long on several threads as on one.
        self._model = ms.cost_model.XGBModel(
            extractor=decision_features(domain), num_warmup_samples=batch, num_tuning_cores=1
        )
        self._untold: list[tuple[Any, Any]] = []
        self._context.pre_tuning(trials, batch, database=self._database, cost_model=self._model)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed NumPy's global generator, from which the cost model draws scores before it is trained, for the block."""
        import numpy as np

        state = np.random.get_state()
        np.random.seed(self._random.randrange(1 << 32))
        try:
            yield
        finally:
            np.random.set_state(state)

    def teach(self, known: Mapping[Candidate, float | None]) -> None:
        """Add candidates of earlier runs as if they had been measured in this one."""
        schedules = [drawn(self._module, c.template, self._domain.tables[c.template], c.values) for c in known]
        measured = [self._ms.MeasureCandidate(schedule, []) for schedule in schedules]
        self._learn(measured, list(known.values()), self._results(list(known.values())))

    def generate(self) -> dict[Candidate, Any]:
        with self._seeded():
            proposals = self._context.generate_measure_candidates() or []
        named = {self._domain.candidate(*decisions_of(p.sch.mod)): p for p in proposals}
        return {candidate: p for candidate, p in named.items() if candidate is not None}

    def predict(self, asked: Mapping[Candidate, Any]) -> dict[Candidate, float]:
        """The model's scores, larger being better; empty before training, when they are random numbers."""
        if self._model.booster is None or self._model.data_size < self._model.num_warmup_samples:
            return {}
        scores = self._model.predict(self._context, list(asked.values()))
        return dict(zip(asked, map(float, scores), strict=True))

    def pass_over(self, proposed: Sequence[Any]) -> None:
        """Count candidates that are being measured as drawn; their times follow later."""
        if proposed:
            self._context.notify_runner_results(list(proposed), self._results([None] * len(proposed)))

    def notify(self, asked: Mapping[Candidate, Any], seconds: Sequence[float | None]) -> None:
        measured, results = list(asked.values()), self._results(seconds)
        self._context.notify_runner_results(measured, results)
        self._learn(measured, seconds, results)

    def _results(self, seconds: Sequence[float | None]) -> list[Any]:
        return [self._ms.runner.RunnerResult([s] if s else None, None if s else "failed") for s in seconds]

    def _learn(self, measured: Sequence[Any], seconds: Sequence[float | None], results: Sequence[Any]) -> None:
        """Add results to the cost model and the database.

        The model trains at every update, and is not used before it has enough samples, so the first ones are added
        together.
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
    """A mutator that samples one decision of a trace anew."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    # A trace of `drawn` begins with the block and its template, followed by two instructions for each decision.
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
    """A post-processor that rejects points which their template does not allow."""
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

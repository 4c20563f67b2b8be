"""MetaSchedule's search over our templates.

Every template of a problem becomes a design space: a placeholder function on whose trace its decisions are drawn with
`sample_categorical` and written down as annotations. The evolutionary search mutates those decisions and ranks
candidates with its XGBoost model; what it proposes is read back from the annotations and built by the template. So
schedules and generated kernels are searched alike. Three parts of MetaSchedule are replaced, because they know only
tiles, vectors and unrolling (`MutateDecision`), only the loops of the program at hand (`DecisionFeatures`), and
nothing of restrictions between decisions (`RejectRestricted`).
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.spaces import find, points
from ..core.template import Table

# The stock population of 512 is for spaces of billions of points; ours have hundreds to tens of thousands.
POPULATION = 128
MARK = "tvm_sparse."


def candidate_of(module: Any) -> Candidate:
    """The candidate that a placeholder's annotations stand for."""
    notes = {
        str(k)[len(MARK) :]: v for k, v in module["main"].body.block.annotations.items() if str(k).startswith(MARK)
    }
    template = find(str(notes.pop("template")))
    return template.candidate({name: int(value) for name, value in notes.items()})


class Search:
    """Proposes batches of candidates, and learns from what is reported.

    Parameters
    ----------
    known
        Candidates measured before, with their median seconds (None: failed). They are never proposed again, and
        teach the cost model before the first proposal.

    Attributes
    ----------
    predicted
        What the cost model says of the candidates that were proposed last, once it has been trained.
    """

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        tables: Mapping[str, Table],
        *,
        known: Mapping[Candidate, float | None],
        trials: int,
        batch: int,
        seed: int,
    ) -> None:
        self._known = dict(known)
        self.predicted: dict[Candidate, float] = {}
        # A search of a space that the budget covers would only miss points.
        everything = [
            c for c in itertools.islice(points(problem, machine, tables), trials + len(known) + 1) if c not in known
        ]
        self._rest: list[Candidate] | None = None
        self._batch = batch
        if len(everything) <= trials:
            random.Random(seed).shuffle(everything)
            self._rest = everything
            return
        self._mapped: dict[Candidate, Any] = {}
        self._meta = _MetaSchedule(problem, machine, tables, trials + len(known), batch, seed)
        for candidate, seconds in known.items():
            if candidate.template in tables:
                self._meta.teach(candidate, seconds)

    def propose(self) -> list[Candidate]:
        """The next candidates, none of them known; empty when the search has nothing left."""
        if self._rest is not None:
            batch, self._rest = self._rest[: self._batch], self._rest[self._batch :]
            return batch
        while True:
            proposals = self._meta.generate()
            if not proposals:
                return []
            fresh = {c: m for c, m in proposals.items() if c not in self._known}
            stale = {c: m for c, m in proposals.items() if c in self._known}
            if stale:
                self._meta.notify(stale, [self._known[c] for c in stale])
            if fresh:
                self._mapped, self.predicted = fresh, self._meta.predict(fresh)
                return list(fresh)

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """Median seconds of each candidate that was proposed last, None for a failure."""
        self._known.update(results)
        if self._rest is None:
            asked = {c: m for c, m in self._mapped.items() if c in results}
            self._meta.notify(asked, [results[c] for c in asked])


class _MetaSchedule:
    """The search strategy, cost model and in-memory database of one run."""

    def __init__(
        self, problem: Problem, machine: Machine, tables: Mapping[str, Table], trials: int, batch: int, seed: int
    ) -> None:
        if "tvm.s_tir.tensor_intrin" not in sys.modules:
            # TuneContext imports every back end's tensor intrinsics, which takes 10 s and which no space here uses.
            sys.modules["tvm.s_tir.tensor_intrin"] = types.ModuleType("tvm.s_tir.tensor_intrin")
        import logging

        import tvm
        from tvm import te
        from tvm.s_tir import meta_schedule as ms

        from ..artifacts.compile import target_of

        logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)
        a = te.placeholder((1,), name="a")
        placeholder = te.create_prim_func([a, te.compute((1,), lambda i: a[i], name="b")])
        self._module = tvm.IRModule({"main": placeholder.with_attr("global_symbol", "main")})
        self._tables = tables
        self._ms, self._tvm = ms, tvm

        def spaces(schedule: Any) -> list[Any]:
            return [self._space(name) for name in tables]

        self._context = ms.TuneContext(
            mod=self._module,
            target=target_of(machine),
            space_generator=ms.space_generator.ScheduleFn(
                spaces,
                sch_rules=[],
                postprocs=[reject_restricted(problem, machine)],
                mutator_probs={mutate_decision(seed): 1.0},
            ),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION, init_min_unmeasured=batch, genetic_max_fail_count=20
            ),
            num_threads=1,
            rand_state=seed + 1,
            logger=logging.getLogger("tvm.s_tir.meta_schedule.tvm_sparse"),
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._module)
        # A few hundred rows of a few numbers: on several threads training takes ten times as long as on one.
        self._model = ms.cost_model.XGBModel(
            extractor=decision_features(tables), num_warmup_samples=batch, num_tuning_cores=1
        )
        self._context.pre_tuning(trials, batch, database=self._database, cost_model=self._model)

    def _space(self, name: str) -> Any:
        from tvm.s_tir import Schedule

        schedule = Schedule(self._module)
        block = schedule.get_sblock("root")
        schedule.annotate(block, MARK + "template", name)
        for decision, values in self._tables[name].items():
            drawn = schedule.sample_categorical(list(values), [1.0 / len(values)] * len(values))
            schedule.annotate(block, MARK + decision, drawn)
        return schedule

    def teach(self, candidate: Candidate, seconds: float | None) -> None:
        """Enter a candidate of an earlier run, as if it had been measured in this one."""
        from tvm.s_tir import Schedule

        table, values = self._tables[candidate.template], candidate.values
        if list(values) != list(table) or any(values[d] not in table[d] for d in table):
            return  # another version's decisions
        schedule = Schedule(self._module)
        block = schedule.get_sblock("root")
        schedule.annotate(block, MARK + "template", candidate.template)
        for decision, choices in table.items():
            weights = [1.0 / len(choices)] * len(choices)
            drawn = schedule.sample_categorical(list(choices), weights, decision=choices.index(values[decision]))
            schedule.annotate(block, MARK + decision, drawn)
        self.notify({candidate: self._ms.MeasureCandidate(schedule, [])}, [seconds], tell_strategy=False)

    def generate(self) -> dict[Candidate, Any]:
        proposals = self._context.generate_measure_candidates() or []
        return {candidate_of(p.sch.mod): p for p in proposals}

    def predict(self, asked: Mapping[Candidate, Any]) -> dict[Candidate, float]:
        """The model's scores, the larger the better; empty before it has been trained, when they are random numbers."""
        if self._model.booster is None or self._model.data_size < self._model.num_warmup_samples:
            return {}
        scores = self._model.predict(self._context, list(asked.values()))
        return dict(zip(asked, map(float, scores), strict=True))

    def notify(
        self, asked: Mapping[Candidate, Any], seconds: Sequence[float | None], tell_strategy: bool = True
    ) -> None:
        measured = list(asked.values())
        results = [self._ms.runner.RunnerResult([s] if s else None, None if s else "failed") for s in seconds]
        if tell_strategy:
            self._context.notify_runner_results(measured, results)
        self._model.update(self._context, measured, results)
        for one, s in zip(measured, seconds, strict=True):
            if s:
                record = self._ms.database.TuningRecord(one.sch.trace, self._workload, [s], self._context.target, [])
                self._database.commit_tuning_record(record)


def mutate_decision(seed: int) -> Any:
    """A mutator that draws one decision of a trace anew."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    @derived_object
    class MutateDecision(ms.mutator.PyMutator):
        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(seed)

        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, trace: Any, _: Any = None) -> Any:
            drawn = [(i, d) for i, d in trace.decisions.items() if i.kind.name == "SampleCategorical"]
            drawn = [(i, d) for i, d in drawn if len(i.attrs[0]) > 1]
            if not drawn:
                return None
            instruction, old = self.random.choice(drawn)
            new = self.random.choice([v for v in range(len(instruction.attrs[0])) if v != int(old)])
            return trace.with_decision(instruction, new, True)

        def clone(self) -> Any:
            return MutateDecision()

    return MutateDecision()


def reject_restricted(problem: Problem, machine: Machine) -> Any:
    """A post-processor that refuses points which their template does not allow."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    @derived_object
    class RejectRestricted(ms.postproc.PyPostproc):
        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, sch: Any) -> bool:
            candidate = candidate_of(sch.mod)
            return find(candidate.template).allowed(problem, machine, candidate.values) is None

        def clone(self) -> Any:
            return RejectRestricted()

    return RejectRestricted()


def decision_features(tables: Mapping[str, Table]) -> Any:
    """Features of a candidate: which template it is, and log2 of each of its decisions in a column of its own."""
    import numpy as np
    import tvm
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    columns = {
        (name, decision): i for i, (name, decision) in enumerate((n, d) for n, t in tables.items() for d in (None, *t))
    }

    @derived_object
    class DecisionFeatures(ms.feature_extractor.PyFeatureExtractor):
        def extract_from(self, context: Any, candidates: list[Any]) -> list[Any]:
            rows = []
            for one in candidates:
                candidate = candidate_of(one.sch.mod)
                row = np.full((1, len(columns)), -1.0)
                row[0, columns[candidate.template, None]] = 1.0
                for decision, value in candidate.decisions:
                    row[0, columns[candidate.template, decision]] = math.log2(value + 1)
                rows.append(tvm.runtime.tensor(row))
            return rows

    return DecisionFeatures()

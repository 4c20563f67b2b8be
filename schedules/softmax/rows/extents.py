"""The numbers of one point of the CPU templates; no compiler is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.template import Decisions, ceildiv
from tvm_sparse.operators.softmax.problem import Softmax

from ..problems import RowProblem, algorithm, out_dtype

extent = Derived["Extents", int]


@dataclass(frozen=True)
class Extents:
    """What a kernel is generated from."""

    # Whether the kernel writes probabilities; else it is logsumexp's.
    softmax: bool
    # The paper's: "online", "safe" or "naive".
    algorithm: str
    # The logits' dtype and how many a row has.
    dtype: str
    # The dtype of the probabilities.
    out_dtype: str
    # As `dtype`.
    vocab: int
    # Elements of a vector.
    simd: int
    # Vectors between two rescalings.
    chunk: int
    # Whether the exponentials computed for the sum are kept, and probabilities made of them.
    kept: bool

    @classmethod
    def of(cls, problem: RowProblem, decisions: Decisions) -> Extents:
        simd, vocab = decisions["simd"], problem.vocab
        chunk = max(decisions.get("chunk", vocab) // simd, 1)
        kept = decisions.get("kept", 0) == 1
        written = out_dtype(problem)
        return cls(isinstance(problem, Softmax), algorithm(problem), problem.dtype, written, vocab, simd, chunk, kept)

    # Whole vectors of a row.
    vectors = extent(lambda e: e.vocab // e.simd)
    # Chunks of a row; the last one may be shorter.
    chunks = extent(lambda e: ceildiv(e.vectors, e.chunk))
    # The first element that no vector covers.
    tail = extent(lambda e: e.vectors * e.simd)
    # Steps in which the elements of a vector are reduced to one.
    halvings = extent(lambda e: e.simd.bit_length() - 1)
    # Elements of the float32 row that keeps exponentials where the output cannot.
    scratch = extent(lambda e: e.tail if e.kept and e.out_dtype != "float32" else 0)

    @property
    def exceeds(self) -> bool:
        """Whether an element may exceed what is subtracted from it before its exponential is taken.

        The naive algorithm subtracts nothing; logsumexp's maximum is finite where an element is infinite.
        """
        return not self.softmax or self.algorithm == "naive"

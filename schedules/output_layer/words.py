"""What templates of the output layer ask of a problem, and where a row's elements are. Loads no compiler.

Every problem has *lists* of tokens, each with a *beam* of rows of hidden states. The exact head has one list, the
vocabulary, and all rows of its batch are the beam. A token's number in its list is its *position*.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm_sparse.operators.candidate_logits.problem import CandidateLogits
from tvm_sparse.operators.candidate_topk.problem import CandidateTopk
from tvm_sparse.operators.head_draw.problem import HeadDraw
from tvm_sparse.operators.head_topk.problem import HeadTopk

# Those whose list of tokens is the vocabulary.
ExactHead = HeadTopk | HeadDraw
OutputLayer = ExactHead | CandidateTopk | CandidateLogits


def draws_one(problem: OutputLayer) -> bool:
    """Whether a token is drawn, and no best ones are found."""
    return isinstance(problem, HeadDraw)


def block_of(problem: OutputLayer) -> int:
    """Neighbouring tokens that a candidate stands for."""
    return problem.block if isinstance(problem, CandidateTopk) else 1


def most_words(problem: OutputLayer) -> int:
    """Tokens of a list that is full."""
    return problem.vocab if isinstance(problem, ExactHead) else problem.m * block_of(problem)


def lists_of(problem: OutputLayer) -> tuple[int, int]:
    """Lists of tokens, and rows of hidden states of each."""
    return (1, problem.batch) if isinstance(problem, ExactHead) else (problem.lists, problem.beam)


def best_of(problem: OutputLayer) -> int:
    """Tokens to be found in each row, or drawn; 0 of the gathered product, which finds none."""
    return 0 if isinstance(problem, CandidateLogits) else 1 if isinstance(problem, HeadDraw) else problem.k


def candidates_of(problem: OutputLayer) -> int:
    """Candidates of a list; 0 of the exact head, whose list is the vocabulary."""
    return 0 if isinstance(problem, ExactHead) else problem.m


def stored_of(problem: OutputLayer) -> str:
    """The dtype of an embedding in eight bits; empty of one that has the dtype of the hidden states."""
    return problem.stored if isinstance(problem, HeadTopk) else ""


def groups_of(problem: OutputLayer) -> int:
    """Scales of a row of an embedding in eight bits, each of a group of columns; 0 if a row has one."""
    return problem.groups if isinstance(problem, HeadTopk) else 0


def writes_scores(problem: OutputLayer) -> bool:
    """Whether the scores of all words are an output, which takes the place of a workspace."""
    return isinstance(problem, HeadTopk) and bool(problem.logits)


def with_scores(io: Any) -> Any:
    """A kernel's arguments with its scores under one name, whether they are an output or a workspace."""
    if not writes_scores(io.problem):
        return io
    return SimpleNamespace(**{**vars(io), "scores": io.logits})


def rows_shape(problem: OutputLayer, *rest: int) -> tuple[int | str, ...]:
    """The shape of a workspace that has `rest` elements for each row."""
    return ("batch", *rest) if isinstance(problem, ExactHead) else ("lists", problem.beam, *rest)


def at_row(io: Any, index: Any, row: Any, *rest: Any) -> list[Any]:
    """Indices of an element of `hidden`, of an output or of a workspace, for row `row` of list `index`."""
    return [row, *rest] if isinstance(io.problem, ExactHead) else [index, row, *rest]

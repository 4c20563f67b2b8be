"""What the spaces of the output layer's templates ask of a problem. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.operators.candidate_logits.problem import CandidateLogits
from tvm_sparse.operators.candidate_topk.problem import CandidateTopk
from tvm_sparse.operators.head_topk.problem import HeadTopk

OutputLayer = HeadTopk | CandidateTopk | CandidateLogits


def block_of(problem: OutputLayer) -> int:
    """Neighbouring tokens that a candidate stands for."""
    return problem.block if isinstance(problem, CandidateTopk) else 1


def most_words(problem: OutputLayer) -> int:
    """Tokens of a list that is full."""
    return problem.vocab if isinstance(problem, HeadTopk) else problem.m * block_of(problem)


def lists_of(problem: OutputLayer) -> tuple[int, int]:
    """Lists of tokens, and rows of hidden states of each."""
    return (1, problem.batch) if isinstance(problem, HeadTopk) else (problem.lists, problem.beam)


def best_of(problem: OutputLayer) -> int:
    """Tokens to be found in each row; 0 of the gathered product, which finds none."""
    return 0 if isinstance(problem, CandidateLogits) else problem.k


def candidates_of(problem: OutputLayer) -> int:
    """Candidates of a list; 0 of the exact head, whose list is the vocabulary."""
    return 0 if isinstance(problem, HeadTopk) else problem.m

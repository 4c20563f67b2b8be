"""An output head that multiplies with candidate words only, found by locality sensitive hashing.

On a GPU a step is one program, `lsh_topk`: it hashes the hidden states, looks up their codes, and multiplies with the
embeddings of frequent words and of words with enough hits. On CPUs, and if the candidates themselves are requested, it
is two programs: `lsh_candidates` compacts these words into a list, whose length stays on the device, and
`candidate_topk` multiplies with their embeddings. If the exact head, `head_topk`, is faster, it is used instead.

Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import spaces
from ..core.given import integer
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import make
from ..formats import wta
from ..formats.bitmap import pack_bits
from ..operators.candidate_logits.call import candidate_logits
from ..operators.candidate_topk.call import candidate_topk
from ..operators.head_topk.call import head_topk
from ..operators.logsumexp.call import logsumexp
from ..operators.lsh_candidates.call import lsh_candidates
from ..operators.lsh_topk.call import lsh_topk
from ..operators.softmax.call import log_softmax
from ..operators.softmax_sample.call import softmax_sample
from ..operators.softmax_sample.problem import MAX_K
from ..operators.softmax_topk.reference import GREEDY, LEAST_SCALE
from ..runtime import arrays, dispatch
from ..runtime.arrays import Facts
from ..runtime.calls import check_device, check_floats, facts_beside, inverse_temperature, machine_of, refuse_gradient
from ..runtime.dispatch import Explanation
from . import storage
from .captured import CapturedHead, HeadInfo
from .libraries import kept, library, tensor, to_host
from .settings import (
    HASHED,
    PATHS,
    Hashing,
    Measured,
    Settings,
    check_hashing,
    default_frequent,
    frequent_ids,
    hash_words,
    settings,
)

if TYPE_CHECKING:
    from .frontier import Frontier

FORMAT = 1  # of files written by `save`
HOTTEST = 1 / LEAST_SCALE  # temperature that replaces infinity
FUSED = "fused_step"  # the template of `lsh_topk` without candidate lists


@dataclass(frozen=True)
class HeadExplanation:
    """The result of `LshHead.explain`: the path that a call takes, and the reason.

    Attributes
    ----------
    path
        "lsh" or "exact".
    why
        The reason as a sentence.
    lsh, exact
        Seconds of a step by each path; None if not known.
    kernels
        The path's kernels: the result of `tvm_sparse.explain` for each of its problems.
    """

    path: str
    why: str
    lsh: float | None
    exact: float | None
    kernels: tuple[Explanation, ...]

    @property
    def fused(self) -> bool:
        """Whether the path is LSH without lists, in one program."""
        return self.kernels[0].problem.startswith("lsh_topk/")

    def __str__(self) -> str:
        known = [f"{name} {1e6 * s:.1f} us" for name, s in (("lsh", self.lsh), ("exact", self.exact)) if s is not None]
        times = f" ({', '.join(known)})" if known else ""
        return "\n".join([f"{self.path}: {self.why}{times}", *map(str, self.kernels)])


class LshHead:
    """The output head of a language model, reduced to candidate words at every step.

    The candidates of row i of the hidden states are V_T + {j : L[i, j] >= threshold}, where L[i, j] is the number of
    bands in which the winner-take-all codes of the row and of the embedding of word j agree (equations 4 to 10), and
    V_T are the frequent words. Rows of one sentence share the union of their candidates (equation 3).

    Parameters
    ----------
    embedding
        `(vocab, hidden)` torch tensor or NumPy array of float32, float16 or bfloat16, with one row per word, like the
        weight of an `lm_head`. It is not copied if it is contiguous. The head's arrays are on its device.
    k, units, bands
        K, u and W of the hash. The paper recommends (8, 3, 500) and (16, 3, 500). More bands discriminate better and
        cost time; a larger k or more units make hits rarer. If hidden states are not near the embeddings of their
        words, small k with high thresholds is better, see `fit`. A code has units * ceil(log2 k) bits, at most 30.
    threshold
        Number of bands in which a candidate's code must agree with the row's, 0 <= threshold <= bands. With random
        codes of 12 bits and 500 bands a word has 0.12 hits on average: 7 words in 1,000 have 2, and 3 in 10,000 have 3,
        so that the default of 3 leaves few accidental candidates. 0 makes every word a candidate: the exact head,
        without tables.
    frequent
        Words that are always candidates: a number of first ids, for ids sorted by decreasing frequency, as in most
        vocabularies approximately; or an array of ids. Default: vocab / 16. According to the paper, recall is too low
        for beam search without them.
    capacity
        Most words in a candidate list. Further words, those with the largest ids, are left out and counted in
        `info.overflow`. Default: a quarter of the vocab plus the frequent words. It must be at least the `n` of calls.
    bias
        `(vocab,)` float32, added to the logits; -inf excludes a word.
    seed
        Seed of the permutations: equal seeds give equal heads.
    table
        `"direct"`, for codes of at most 16 bits, or `"cuckoo"`; default: direct up to 12 bits.
    path
        `"auto"`: the faster one by the measurements of `fit` or by records, see `explain`; or `"lsh"` or `"exact"`. An
        attribute of the same name may be set at any time.

    Attributes
    ----------
    embedding, bias
        As given.
    settings
        The numbers, including `capacity` and `table`.
    measured
        The measurements of `fit`, by (rows, sentences).

    Raises
    ------
    TypeError, ValueError
        For parameters that cannot work together, naming them with the numbers.
    RuntimeError
        If the bias requires a gradient. An embedding that requires one is detached: there is no backward pass.

    Notes
    -----
    When not to use it: for training, for a vocabulary of a few thousand words, and for batches of hundreds of unrelated
    rows, whose union of candidates is nearly the vocabulary. If the embedding changes, build a new head: the exact path
    assumes that it is constant (`head_topk`).

    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2.
    """

    def __init__(
        self,
        embedding: Any,
        *,
        k: int = 16,
        units: int = 3,
        bands: int = 500,
        threshold: int = 3,
        frequent: Any = None,
        capacity: int | None = None,
        bias: Any = None,
        seed: int = 0,
        table: str | None = None,
        path: str = "auto",
    ) -> None:
        known = _embedding_facts(embedding)
        vocab, hidden = known.shape
        ids = frequent_ids(default_frequent(vocab) if frequent is None else frequent, vocab)
        chosen = settings(
            vocab,
            hidden,
            k=k,
            units=units,
            bands=bands,
            threshold=threshold,
            frequent=len(ids),
            capacity=capacity,
            table=table,
        )
        _problems(chosen, known.dtype, bias is not None, rows=1, n=1, sentences=1)  # raises without kernels
        hashing = None
        if chosen.threshold:
            permutations = wta.permutations(hidden, chosen.k, chosen.units, chosen.bands, integer("seed", seed))
            hashing = hash_words(embedding, permutations, chosen.table, seed)
        self._set(embedding, bias, chosen, hashing, ids, path)

    @classmethod
    def assembled(
        cls, embedding: Any, bias: Any, chosen: Settings, hashing: Hashing | None, frequent: Any, path: str = "auto"
    ) -> LshHead:
        """Make a head from existing parts, without hashing. `frequent` are ids.

        The arrays of `hashing` must be on the device of the embedding, and their values are not checked.
        """
        head = cls.__new__(cls)
        head._set(embedding, bias, chosen, hashing, frequent_ids(np.asarray(frequent), chosen.vocab), path)
        return head

    def _set(
        self, embedding: Any, bias: Any, chosen: Settings, hashing: Hashing | None, ids: np.ndarray, path: str
    ) -> None:
        known = _embedding_facts(embedding)
        self.embedding = arrays.ready("embedding", embedding, known)
        self.bias = None
        if bias is not None:
            _, theirs, _ = facts_beside("bias", bias, (chosen.vocab,), "float32", known, "the embedding is")
            self.bias = arrays.ready("bias", bias, theirs)
        if path not in PATHS:
            raise ValueError(f"path: expected one of {', '.join(PATHS)}, got {path!r}")
        self.path = path
        self.settings = chosen
        self.hashing = hashing
        self.frequent = ids
        self.measured: dict[tuple[int, int], Measured] = {}
        self._known = known
        self._library = library("embedding", embedding)
        self._always = self._library.from_host(pack_bits(np.isin(np.arange(chosen.vocab), ids)), embedding)
        self._explained: dict[tuple[int, int, int, str], tuple[Any, HeadExplanation]] = {}
        self._constants: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"LshHead({self.settings}, dtype={self._known.dtype}, device={self._known.device}, path={self.path!r})"

    @property
    def vocab(self) -> int:
        """Number of words."""
        return self.settings.vocab

    # ---- calls ---------------------------------------------------------------------------------------

    def topk(
        self,
        hidden: Any,
        n: int,
        *,
        sentences: int = 1,
        log: bool = False,
        temperature: float = 1.0,
        path: str | None = None,
    ) -> tuple[Any, Any, HeadInfo]:
        """The n most probable words of every row, among its candidates.

        Parameters
        ----------
        hidden
            `(rows, hidden)` of the embedding's dtype and on its device. Rows of one sentence are consecutive.
        n
            1 <= n <= vocab; with candidate lists at most the capacity.
        sentences
            Number of sentences: rows / sentences rows share a candidate list. `sentences=rows` gives each row its own.
        log
            Return log-probabilities instead of probabilities.
        temperature
            Above 0 and finite.
        path
            Overrides the attribute: "auto", "lsh" or "exact".

        Returns
        -------
        values
            `(rows, n)` float32, descending: probabilities over the row's candidates; 0 (with `log` -inf) if there are
            fewer than n of them.
        indices
            `(rows, n)` int64 words, -1 if there are fewer than n candidates. NaN in a row of `hidden` makes the values
            of that row NaN, but not of others.
        info
            A `HeadInfo`: number of candidates, overflow and log normaliser, on the device.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            For arguments that do not fit, naming them.
        """
        known = self._check_hidden(hidden, sentences)
        rows = known.shape[0]
        n = integer("n", n)
        if not 1 <= n <= self.settings.vocab:
            raise ValueError(f"n: expected 1 <= n <= vocab ({self.settings.vocab}), got {n}")
        self._wanted(n, path)
        # The exact head does not accept zero rows.
        way = self.explain(rows, n, sentences=sentences, path=path) if rows else None
        if way is None or way.path == "exact":
            values, indices, normaliser = head_topk(
                hidden,
                self.embedding,
                n,
                log=log,
                temperature=temperature,
                bias=self.bias,
                normaliser=True,
                constant=True,
            )
            return values, indices, HeadInfo(self._everything(sentences), normaliser, self.settings.vocab)
        if way.fused:
            return self._fused(hidden, n, sentences, log, temperature)
        candidates, counts = self._candidates(hidden, sentences)
        values, indices, normaliser = candidate_topk(
            hidden,
            self.embedding,
            candidates,
            n,
            counts=counts,
            log=log,
            temperature=temperature,
            bias=self.bias,
            normaliser=True,
        )
        return values, indices, HeadInfo(counts, normaliser, self.settings.capacity)

    def log_softmax(self, hidden: Any, *, sentences: int = 1, path: str | None = None) -> tuple[Any, Any, HeadInfo]:
        """Log-probabilities of all candidates.

        Returns
        -------
        log_probs
            `(rows, capacity)` float32, -inf beyond the row's candidates. The capacity is the vocab if every word is a
            candidate.
        words
            `(sentences, capacity)` int32: the candidates of each list, ascending, then -1. Row r has list
            r // (rows / sentences).
        info
            As in `topk`.
        """
        rows = self._check_hidden(hidden, sentences).shape[0]
        logits, words, counts = self._logits(hidden, sentences, self._path(rows, 1, sentences, path))
        return log_softmax(logits), words, HeadInfo(counts, logsumexp(logits), words.shape[1])

    def logits(self, hidden: Any, *, sentences: int = 1, path: str | None = None) -> tuple[Any, Any, Any]:
        """Logits of all candidates: `(rows, capacity)` float32 with -inf beyond them, and the words and counts of the
        lists.
        """
        rows = self._check_hidden(hidden, sentences).shape[0]
        return self._logits(hidden, sentences, self._path(rows, 1, sentences, path))

    def sample(
        self,
        hidden: Any,
        temperature: Any = 1.0,
        *,
        top_k: Any = None,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
        uniforms: Any = None,
        seed: Any = None,
        offset: Any = 0,
        sentences: int = 1,
        path: str | None = None,
    ) -> tuple[Any, Any, HeadInfo]:
        """One word per row, drawn as `softmax_sample` draws from the logits of the row's candidates.

        Parameters
        ----------
        temperature, top_k, top_p, min_p, uniforms, seed, offset
            As in `softmax_sample`: numbers, or arrays with a value for each row. If top_k is one number, at most the
            capacity, and the temperature is one number, logits are not written to memory.

        Returns
        -------
        words
            `(rows,)` int32. A row with NaN returns its first candidate, a row without candidates -1.
        log_probs
            `(rows,)` float32: ln p(word), of the distribution over all candidates at this temperature and before all
            filters; NaN for a row without a distribution. Acceptance tests of speculative decoding can use it directly
            if there are no filters; with filters, subtract the logarithm of the remaining probability.
        info
            As in `topk`, at this temperature, or at 1 if that is below 1e-5 or an array.
        """
        xp = self._library
        rows = self._check_hidden(hidden, sentences).shape[0]
        numbers = {"uniforms": uniforms, "seed": seed, "offset": offset}
        one = not getattr(temperature, "shape", ())
        scale = temperature
        if one:
            try:
                scale = min(float(temperature), HOTTEST)
            except (TypeError, ValueError):
                inverse_temperature(temperature)  # raises for an invalid temperature
            if not scale >= 0:
                raise ValueError(f"temperature: expected a number of at least 0, got {temperature!r}")
            if scale < GREEDY:
                scale, top_k = 1.0, 1
        if (
            one
            and not getattr(top_k, "shape", ())
            and 0 < (most := _limit(top_k)) <= min(MAX_K, self.settings.capacity)
        ):
            log_probs, ids, info = self.topk(
                hidden, min(most, self.vocab), sentences=sentences, log=True, temperature=scale, path=path
            )
            place = softmax_sample(log_probs, top_p=top_p, min_p=min_p, **numbers)[0]
            place = xp.cast(place, "int64")[:, None]
            return xp.cast(xp.take_along(ids, place)[:, 0], "int32"), xp.take_along(log_probs, place)[:, 0], info
        logits, words, counts = self._logits(hidden, sentences, self._path(rows, 1, sentences, path))
        place, chosen = softmax_sample(logits, temperature=scale, top_k=top_k, top_p=top_p, min_p=min_p, **numbers)
        info = HeadInfo(counts, logsumexp(logits * (1.0 / scale) if one else logits), words.shape[1])
        lists = xp.arange(rows, "int64", hidden) // max(1, rows // sentences)
        drawn = xp.take_along(xp.take(words, lists), xp.cast(place, "int64")[:, None])[:, 0]
        return drawn, chosen, info

    def explain(self, rows: int, n: int = 1, *, sentences: int = 1, path: str | None = None) -> HeadExplanation:
        """The path of a call with `(rows, hidden)`, and the reason.

        With path "auto" it is exact if the threshold is 0 or n exceeds the capacity. Otherwise it is the faster one by
        the measurements of `fit` for this number of rows, or by records, if those of all kernels involved are exact or
        of the next larger batch. Without these it is LSH.
        """
        if sentences < 1 or rows % sentences:
            raise ValueError(f"sentences: expected a divisor of the {rows} rows, got {sentences}")
        key = rows, n, sentences, self._wanted(n, path)
        found = self._explained.get(key)
        # Another dict of launchers means that other kernels, and perhaps other records, are in use.
        if found is None or found[0] is not dispatch.dispatcher.launchers:
            found = self._explained[key] = (dispatch.dispatcher.launchers, self._explain(*key))
        return found[1]

    def capture(
        self, rows: int, n: int, *, sentences: int = 1, log: bool = False, temperature: float = 1.0
    ) -> CapturedHead:
        """Capture `topk` for `(rows, hidden)` as a CUDA graph with fixed input and outputs: see `CapturedHead`.

        Raises
        ------
        ValueError
            If the head is not on a GPU.
        """
        if self._known.device != "cuda":
            raise ValueError("embedding: a CUDA graph needs a head on a GPU; use head.to('cuda')")
        hidden = arrays.empty((rows, self.settings.hidden), self._known.dtype, self.embedding, self._known)
        hidden.zero_()

        def step() -> tuple[Any, Any, HeadInfo]:
            return self.topk(hidden, n, sentences=sentences, log=log, temperature=temperature)

        return CapturedHead(step, hidden, self.vocab, (n, sentences, log))

    # ---- life ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Results of calls are not copied, since kernels cannot be copied.
        return {**self.__dict__, "_explained": {}, "_constants": {}}

    def to(self, device: Any) -> LshHead:
        """The head with its arrays as torch tensors on a device; itself if they are already there.

        A NumPy head stays one with `device="cpu"`.
        """
        if not arrays.is_torch(self.embedding):
            if str(device) == "cpu":
                return self
            return self._moved(lambda array: tensor(array, device))
        if self.embedding.to(device) is self.embedding:
            return self
        return self._moved(lambda array: array.to(device))

    def _moved(self, move: Any) -> LshHead:
        hashing = self.hashing
        if hashing is not None:
            hashing = hashing.mapped(move)
        bias = None if self.bias is None else move(self.bias)
        head = self.assembled(move(self.embedding), bias, self.settings, hashing, self.frequent, self.path)
        head.measured = dict(self.measured)
        return head

    def save(self, path: str | Path, *, embedding: bool = True) -> Path:
        """Write the head to a file: `.safetensors` or `.npz`; without a suffix safetensors if installed, else npz.

        Parameters
        ----------
        path
            The file to write; an existing one is replaced.
        embedding
            Whether to include the embedding and the bias. Otherwise pass them to `load`.

        Returns
        -------
        path
            The path with its suffix.
        """
        held: dict[str, Any] = {"frequent": self.frequent}
        if embedding:
            held |= {"embedding": self.embedding, "bias": self.bias}
        if self.hashing is not None:
            held |= {name: getattr(self.hashing, name) for name in HASHED}
        meta = {
            "format": FORMAT,
            "settings": dataclasses.asdict(self.settings),
            "path": self.path,
            "library": "torch" if arrays.is_torch(self.embedding) else "numpy",
            "rehashes": self.hashing.rehashes if self.hashing is not None else 0,
            "measured": [[*key, *dataclasses.astuple(found)] for key, found in self.measured.items()],
        }
        return storage.write(Path(path), {name: to_host(a) for name, a in held.items() if a is not None}, meta)

    @classmethod
    def load(cls, path: str | Path, *, device: Any = None, embedding: Any = None, bias: Any = None) -> LshHead:
        """Load a head written by `save`.

        Parameters
        ----------
        device
            Device of its arrays, as torch tensors. Default: on the CPU, in the library from which they were saved.
        embedding, bias
            For a file without them.

        Raises
        ------
        ValueError
            If the file is damaged, of another version, or does not describe a valid head.
        """
        path = Path(path)
        held, meta = storage.read(path)
        if meta.get("format") != FORMAT:
            raise ValueError(f"{path}: format {meta.get('format')!r}; this version reads {FORMAT}")
        try:
            chosen = Settings(**meta["settings"])
            measured = {(row[0], row[1]): Measured(*row[2:]) for row in meta["measured"]}
            ids, own, own_bias = held["frequent"], held.get("embedding"), held.get("bias")
            which, kind = meta["path"], meta["library"]
            hashing = None
            if chosen.threshold:
                parts = {name: held.get(name) for name in HASHED}
                hashing = Hashing(**parts, rehashes=meta["rehashes"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a head: {error}") from error
        if own is None and embedding is None:
            raise ValueError(f"{path}: holds no embedding; pass it as `embedding`")
        _check_saved(path, chosen, hashing, own)
        if embedding is not None:
            own, own_bias = to_host(embedding), None if bias is None else to_host(bias)
            if own.shape != (chosen.vocab, chosen.hidden):
                raise ValueError(f"embedding: expected shape ({chosen.vocab}, {chosen.hidden}), got {own.shape}")
        head = cls.assembled(own, own_bias, chosen, hashing, ids, which)
        head.measured = measured
        if device is not None or kind == "torch":
            head = head._moved(lambda array: tensor(array, "cpu" if device is None else device))
        return head

    @classmethod
    def fit(
        cls, embedding: Any, hidden_samples: Any, recall: float = 0.99, n: int = 12, **options: Any
    ) -> tuple[LshHead, Frontier]:
        """The fastest measured head whose candidates contain at least this share of the true n most probable words.

        See `tvm_sparse.layers.fitting.fit` for the options and the frontier.
        """
        from .fitting import fit

        return fit(cls, embedding, hidden_samples, recall, n, **options)

    # ---- parts ---------------------------------------------------------------------------------------

    def _check_hidden(self, hidden: Any, sentences: Any) -> Facts:
        known = arrays.facts("hidden", hidden)
        check_floats("hidden", known, rank=2)
        refuse_gradient("hidden", hidden)
        theirs = self._known
        if known.shape[1] != self.settings.hidden or known.dtype != theirs.dtype:
            raise ValueError(
                f"hidden: expected shape (rows, {self.settings.hidden}) and dtype {theirs.dtype}, as the embedding has,"
                f" got {known.shape} and {known.dtype}"
            )
        check_device("hidden", known, theirs, "the embedding is")
        if library("hidden", hidden) is not self._library:
            raise TypeError(
                f"hidden: expected an array of the embedding's library ({type(self.embedding).__name__}), got"
                f" {type(hidden).__name__}"
            )
        sentences = integer("sentences", sentences)
        if sentences < 1 or known.shape[0] % sentences:
            raise ValueError(f"sentences: expected a divisor of the {known.shape[0]} rows, got {sentences}")
        return known

    def _wanted(self, n: int, path: str | None) -> str:
        """The path of a call for n words: `path`, or the head's own. Raises `ValueError` if it cannot be taken."""
        path = self.path if path is None else path
        if path not in PATHS:
            raise ValueError(f"path: expected one of {', '.join(PATHS)}, got {path!r}")
        if path == "lsh" and self.settings.threshold == 0:
            raise ValueError("path: got 'lsh', but with threshold=0 every word is a candidate, and there are no tables")
        if path == "lsh" and n > self.settings.capacity:
            raise ValueError(f"n: expected at most the capacity ({self.settings.capacity}), got {n}")
        return path

    def _fused(self, hidden: Any, n: int, sentences: int, log: bool, temperature: float) -> tuple[Any, Any, HeadInfo]:
        """A step without lists, and so without a capacity."""
        hashing, shape = self.hashing, tuple(hidden.shape)
        assert hashing is not None  # the threshold is not 0
        ids = self._constant("ids", 1, lambda: self._library.from_host(self.frequent.astype(np.int32), self.embedding))
        values, indices, normaliser, counts = lsh_topk(
            hidden.reshape(sentences, -1, shape[1]),
            self.embedding,
            hashing.permutations,
            hashing.words,
            hashing.table,
            self._always,
            ids,
            self.settings.threshold,
            n,
            multipliers=hashing.multipliers,
            log=log,
            temperature=temperature,
            bias=self.bias,
        )
        found = HeadInfo(counts, normaliser.reshape(-1), self.settings.vocab)
        return values.reshape(shape[0], n), indices.reshape(shape[0], n), found

    def _path(self, rows: int, n: int, sentences: int, path: str | None) -> str:
        wanted = self._wanted(n, path)
        if not rows:
            return "exact"  # which handles zero rows
        return self.explain(rows, n, sentences=sentences, path=path).path if wanted == "auto" else wanted

    def _candidates(self, hidden: Any, sentences: int) -> tuple[Any, Any]:
        hashing = self.hashing
        assert hashing is not None  # the threshold is not 0
        return lsh_candidates(
            hidden.reshape(sentences, -1, self.settings.hidden),
            hashing.permutations,
            hashing.words,
            hashing.table,
            multipliers=hashing.multipliers,
            always=self._always,
            threshold=self.settings.threshold,
            capacity=self.settings.capacity,
        )

    def _logits(self, hidden: Any, sentences: int, path: str) -> tuple[Any, Any, Any]:
        if path == "exact":
            counts = self._everything(sentences)
            words = self._constant("words", 1, lambda: self._library.arange(self.settings.vocab, "int32", hidden))
            logits = candidate_logits(hidden, self.embedding, words, bias=self.bias)
            words = words.reshape(1, -1)
            return logits, words if sentences == 1 else self._library.concatenate([words] * sentences, 0), counts
        words, counts = self._candidates(hidden, sentences)
        return candidate_logits(hidden, self.embedding, words, counts=counts, bias=self.bias), words, counts

    def _everything(self, sentences: int) -> Any:
        """The candidate counts if every word is a candidate."""
        vocab = self.settings.vocab
        return self._constant(
            "counts", sentences, lambda: self._library.full((sentences,), vocab, "int32", self.embedding)
        )

    def _constant(self, name: str, count: int, made: Any) -> Any:
        return kept(self._constants, (name, count), made)

    def _explain(self, rows: int, n: int, sentences: int, path: str) -> HeadExplanation:
        own = self.settings
        machine = machine_of("embedding", self._known)
        problems = _problems(own, self._known.dtype, self.bias is not None, rows, n, sentences)
        if not _fits(problems["fused"], machine):
            problems["fused"] = []
        kernels = {
            name: tuple(dispatch.dispatcher.explain(problem, machine) for problem in which)
            for name, which in problems.items()
        }
        # Fused, unless records say that lists are faster.
        fused, listed = _recorded(kernels["fused"], kernels["lsh"])
        if kernels["fused"] and (fused is None or listed is None or fused <= listed):
            kernels["lsh"] = kernels["fused"]
        found = self.measured.get((rows, sentences))
        if found is not None and found.arch == machine.arch:
            times: dict[str, float | None] = {"lsh": found.lsh, "exact": found.exact}
            source = f"measured by fit for {rows} rows"
        else:
            times = dict(zip(("lsh", "exact"), _recorded(kernels["lsh"], kernels["exact"]), strict=True))
            source = "by the records of their kernels"
        if path != "auto":
            taken, why = path, "it was asked for"
        elif own.threshold == 0:
            taken, why = "exact", "with threshold=0 every word is a candidate"
        elif n > own.capacity:
            taken, why = "exact", f"n={n} exceeds the capacity of {own.capacity} candidates"
        elif times["lsh"] is not None and times["exact"] is not None:
            taken = "lsh" if times["lsh"] < times["exact"] else "exact"
            why = f"the faster one, {source}"
        else:
            missing = [name for name, seconds in times.items() if seconds is None]
            taken = "lsh"
            why = f"no record tells the time of {' and '.join(missing)}; tune these kernels, or use LshHead.fit"
        return HeadExplanation(taken, why, times["lsh"], times["exact"], kernels[taken])


def _limit(top_k: Any) -> int:
    """The number of words that a top_k keeps; 0 for all.

    Raises
    ------
    TypeError
        If it is not an integer.
    """
    return 0 if top_k is None else max(0, integer("top_k", top_k))


def _embedding_facts(embedding: Any) -> Facts:
    library("embedding", embedding)
    known = arrays.facts("embedding", embedding)
    check_floats("embedding", known, rank=2)
    return known


def _problems(chosen: Settings, dtype: str, bias: bool, rows: int, n: int, sentences: int) -> dict[str, list[Problem]]:
    """The problems of a step by each way: `exact`; `lsh`, with lists of candidates; and `fused`, without. None for a
    way that is not possible.

    Raises
    ------
    ProblemError
        If a problem is not valid, with the numbers.
    """
    found: dict[str, list[Problem]] = {"exact": [], "lsh": [], "fused": []}
    if not rows:
        return found
    added = {"bias": 1} if bias else {}
    shape = {"vocab": chosen.vocab, "hidden": chosen.hidden, "dtype": dtype}
    found["exact"] = [make("head_topk", {"batch": rows, "k": n, **shape, **added})]
    if chosen.threshold == 0 or n > chosen.capacity:
        return found
    lists = {"lists": sentences, "beam": rows // sentences, **shape}
    hashed = {name: getattr(chosen, name) for name in ("k", "units", "bands", "table")}
    found["lsh"] = [
        make("lsh_candidates", {**lists, **hashed, "capacity": chosen.capacity}),
        make("candidate_topk", {**lists, "m": chosen.capacity, "k": n, **added}),
    ]
    if chosen.frequent:
        found["fused"] = [make("lsh_topk", {**lists, **hashed, "frequent": chosen.frequent, "n": n, **added})]
    return found


def _fits(fused: Sequence[Problem], machine: Machine) -> bool:
    """Whether there is a kernel without lists. Other templates of `lsh_topk` have no advantage."""
    return any(spaces.fallback(problem, machine).template == FUSED for problem in fused)


def _recorded(*ways: Sequence[Explanation]) -> list[float | None]:
    """For each way the sum of its kernels' seconds, if this machine's records have them.

    All are None if some of these times are with hot inputs and others with fresh ones, which cannot be compared.
    """

    def told(kernels: Sequence[Explanation]) -> bool:
        # A library that was compiled without a record may have other decisions, and has no times.
        return bool(kernels) and all(one.how in dispatch.RECORDED and "seconds" in one.figures for one in kernels)

    def seconds(one: Explanation) -> float:
        # An operator that can also run a kernel of PyTorch has the time of the faster one, measured with hot inputs.
        return one.figures.get("way_seconds", one.figures["seconds"])

    known = [kernels if told(kernels) else () for kernels in ways]
    found = [one.figures for kernels in known for one in kernels]
    if len({"way_seconds" not in figures and figures.get("inputs") == "fresh" for figures in found}) > 1:
        return [None for _ in ways]
    return [sum(map(seconds, kernels)) if kernels else None for kernels in known]


def _check_saved(path: Path, chosen: Settings, hashing: Hashing | None, embedding: np.ndarray | None) -> None:
    """Raise `ValueError` unless a file's content is valid, so that no kernel reads outside of its tables."""
    numbers = dataclasses.asdict(chosen)
    try:
        again = settings(**(numbers | ({} if chosen.threshold else {"table": None, "capacity": None})))
        if again != chosen:
            raise ValueError(f"settings: {chosen}")
        if embedding is not None and embedding.shape != (chosen.vocab, chosen.hidden):
            raise ValueError(f"embedding: expected shape ({chosen.vocab}, {chosen.hidden}), got {embedding.shape}")
        if hashing is not None:
            check_hashing(chosen, hashing)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error

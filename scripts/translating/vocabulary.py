"""Vocabularies of subwords, whose ids are sorted by frequency, and sentences as arrays of ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

# Ends a sentence, and pads it; begins one.
EOS, BOS = 0, 1
SPECIAL = ("<eos>", "<bos>")


class Vocabulary(NamedTuple):
    """Byte pairs, as a file of `tokenizers`, and for each of its tokens the id here: 0 and 1 are the special ones, the
    others are sorted by decreasing frequency in the training text.
    """

    file: str
    ids: np.ndarray

    @classmethod
    def learned(cls, texts: Sequence[str], size: int) -> Vocabulary:
        """At most `size` tokens, learned from these texts."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        found = tokenizer.encode_batch(list(texts))
        counts = np.bincount(np.concatenate([one.ids for one in found]), minlength=tokenizer.get_vocab_size())
        counts[: len(SPECIAL)] = counts.max() + np.arange(len(SPECIAL), 0, -1)
        ids = np.empty(len(counts), np.int64)
        ids[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        return cls(tokenizer.to_str(), ids)

    def __len__(self) -> int:  # type: ignore[override]
        return len(self.ids)

    def encoded(self, texts: Iterable[str]) -> list[np.ndarray]:
        """The ids of each text, without special ones."""
        found = self._tokenizer().encode_batch(list(texts))
        return [self.ids[np.asarray(one.ids, np.int64)].astype(np.int32) for one in found]

    def decoded(self, sentences: Iterable[Sequence[int]]) -> list[str]:
        """The texts of ids; special ones are left out."""
        tokens = np.argsort(self.ids)
        return [
            text.strip()
            for text in self._tokenizer().decode_batch(
                [tokens[np.asarray(sentence, np.int64)].tolist() for sentence in sentences], skip_special_tokens=True
            )
        ]

    def _tokenizer(self):
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.file)

    def saved(self) -> str:
        return json.dumps({"file": self.file, "ids": self.ids.tolist()})

    @classmethod
    def loaded(cls, text: str) -> Vocabulary:
        found = json.loads(text)
        return cls(found["file"], np.asarray(found["ids"], np.int64))


class Sentences:
    """Sentences as one array of ids, of which padded batches are cut."""

    def __init__(self, sentences: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(one) for one in sentences], np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self.flat = np.concatenate([*sentences, np.zeros(1, np.int32)])

    def __len__(self) -> int:
        return len(self.lengths)

    def of(self, number: int) -> np.ndarray:
        """The ids of a sentence."""
        return self.flat[self._starts[number] : self._starts[number] + self.lengths[number]]

    def padded(self, numbers: np.ndarray, *, begin: int | None = None, end: int | None = None) -> np.ndarray:
        """`(sentences, longest)` ids of these sentences, after `begin` and before `end` if given, padded with `EOS`."""
        lengths = self.lengths[numbers]
        columns = np.arange(max(1, lengths.max(initial=0)))
        within = columns < lengths[:, None]
        places = np.where(within, self._starts[numbers][:, None] + columns, len(self.flat) - 1)
        rows = np.where(within, self.flat[places], EOS).astype(np.int64)
        edge = np.full((len(rows), 1), EOS, np.int64)
        if end is not None:
            rows = np.concatenate([rows, edge], axis=1)
            rows[np.arange(len(rows)), lengths] = end
        if begin is not None:
            rows = np.concatenate([edge + begin, rows], axis=1)
        return rows

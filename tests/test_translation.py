"""scripts/translation.py: its parts on an invented language, and the whole way from packages to pruned layers."""

from __future__ import annotations

import csv
import io
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
import torch

import tvm_sparse
from tvm_sparse.formats import wta

SCRIPTS = Path(__file__).parent.parent / "scripts"
# An invented language: every word has one translation, and order is kept.
DICTIONARY = {
    "the": "la", "a": "un", "red": "rosa", "old": "velta", "small": "pika", "house": "domo", "tree": "arbo",
    "river": "flumo", "dog": "hundo", "sees": "vida", "likes": "amas", "finds": "trova", "and": "kaj",
}  # fmt: skip
NOUN = ["the", "a"], ["red", "old", "small"], ["house", "tree", "river"]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The module `translation` of scripts/."""
    sys.path.insert(0, str(SCRIPTS))
    import translation

    yield translation
    sys.path.remove(str(SCRIPTS))


def sentence(rng: np.random.Generator) -> str:
    def noun() -> str:
        return " ".join(rng.choice(some) for some in NOUN)

    return f"{noun()} {rng.choice(['sees', 'likes', 'finds'])} {noun()}"


def translated(source: str) -> str:
    return " ".join(DICTIONARY[word] for word in source.split())


# ---- corpus ------------------------------------------------------------------------------------------------------


def catalogue(pairs: list[tuple[str, str]]) -> bytes:
    """A .po file."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'

    head = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'
    return (head + "".join(f"\nmsgid {quoted(s)}\nmsgstr {quoted(t)}\n" for s, t in pairs)).encode()


def wheel(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def debian(path: Path, files: dict[str, bytes]) -> None:
    """An `ar` archive with a data.tar.xz of these files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    raw = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", data.getvalue())):
        raw += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        raw += b"\n" * (len(content) % 2)
    path.write_bytes(raw)


def test_pairs_of_packages(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("babel")
    po = catalogue([
        ("Open _file", "Datei ö_ffnen"), ("&Save", "S&peichern"), ("Close", "Close"), ("empty string", ""),
        ("one line\nanother line", "eine Zeile\nnoch eine Zeile"), ("key_of.a_thing", "Ein Ding"),
        ("run my_task now", "my_task jetzt starten"),
    ])  # fmt: skip
    fuzzy = b'\n#, fuzzy\nmsgid "a guess"\nmsgstr "geraten"\n'
    plural = b'\nmsgid "%d word"\nmsgid_plural "%d words"\nmsgstr[0] "%d Wort"\nmsgstr[1] "%d Worte"\n'
    wheel(tmp_path / "a.whl", {"a/locale/de/LC_MESSAGES/a.po": po + fuzzy + plural, "a/locale/nl/a.po": po})
    french = catalogue([("a red house", "une maison rouge")])
    debian(tmp_path / "b.deb", {"./usr/share/locale/fr/LC_MESSAGES/b.po": french, "./usr/bin/b": b"no catalogue"})
    found = script.corpus.pairs_of(sorted(tmp_path.iterdir()), ["de", "fr"])
    assert {tuple(pair) for pair in found["de"]} == {
        ("Open file", "Datei öffnen"), ("Save", "Speichern"), ("one line", "eine Zeile"),
        ("another line", "noch eine Zeile"), ("run my_task now", "my_task jetzt starten"), ("%d word", "%d Wort"),
        ("%d words", "%d Worte"),
    }  # fmt: skip
    assert {tuple(pair): name for pair, name in found["fr"].items()} == {("a red house", "une maison rouge"): "b.deb"}


def test_no_string_is_in_two_parts(script: Any) -> None:
    corpus, rng = script.corpus, np.random.default_rng(0)
    sources = {sentence(rng) for _ in range(400)}
    pairs = [corpus.Pair(form, translated(source)) for source in sources for form in (source, source.upper() + "!")]
    parts = corpus.parted(pairs, dev=0.1, test=0.2)
    keys = [{corpus.key(pair.source) for pair in part} for part in parts]
    assert not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])
    # Trained on are both forms of a string, tested is one.
    assert len(parts.train) == 2 * len(keys[0]) and len(parts.test) == len(keys[2])
    assert 0.1 < len(keys[2]) / len(sources) < 0.3
    assert corpus.key("%(count)d <b>Words</b>: {name}!") == corpus.key("words")


def test_ids_are_sorted_by_frequency(script: Any) -> None:
    texts = [sentence(np.random.default_rng(n)) for n in range(60)]
    known = script.Vocabulary.learned(texts, 300)
    again = script.Vocabulary.loaded(known.saved())
    assert again.decoded(again.encoded(["a dög likes %s"])) == ["a dög likes %s"]
    counts = np.bincount(np.concatenate(known.encoded(texts)), minlength=len(known))
    assert np.all(np.diff(counts[2:]) <= 0) and counts[:2].tolist() == [0, 0] and counts[2] > 0


# ---- alignment and search ----------------------------------------------------------------------------------------


def test_words_that_translate_a_word(script: Any) -> None:
    from translating.vocabulary import Sentences

    rng, ours, theirs = np.random.default_rng(1), list(DICTIONARY), list(DICTIONARY.values())
    sources = [sentence(rng).split() for _ in range(300)]
    targets = [translated(" ".join(one)).split() for one in sources]
    sides = [
        Sentences([np.array([words.index(w) for w in one], np.int32) for one in some])
        for words, some in ((ours, sources), (theirs, targets))
    ]
    sizes = len(ours), len(theirs)
    words, probabilities = script.alignment.translations(*sides, sizes, 3, "cpu")
    seen = sorted({ours.index(w) for one in sources for w in one})
    assert words[seen, 0].tolist() == seen and (np.diff(probabilities[seen], axis=1) <= 0).all()
    rows, counts = script.alignment.lists(sides[0], np.array([4]), words[:, :1], 2, 16)
    wanted = sorted({0, 1} | {ours.index(w) for w in sources[4]})
    assert rows[0, : counts[0]].tolist() == wanted and (rows[0, counts[0] :] == -1).all()


@pytest.mark.parametrize("centred", [False, True])
def test_tables_without_large_buckets(script: Any, centred: bool) -> None:
    torch.manual_seed(1)
    embedding = torch.randn(120, 24) + 2 * torch.randn(24)  # most words have the same largest columns
    states = torch.randn(6, 24)
    plain = tvm_sparse.LshHead(embedding, k=4, units=2, bands=30, threshold=4, frequent=3, capacity=120)
    found = script.heads.rehashed(plain, centred=centred, most=20)
    of_words = embedding - embedding.mean(0) if centred else embedding
    codes, theirs = (wta.hash_rows(a.numpy(), plain.hashing.permutations.numpy()) for a in (of_words, states))
    size = (codes[:, None] == codes[None]).sum(0)  # (words, bands): of each word's bucket
    hits = ((codes[None] == theirs[:, None]) & (size <= 20)).sum(2)
    assert (size > 20).any() and (hits >= 4).any()
    for row in range(len(states)):
        words = found.logits(states[row : row + 1])[1][0]
        assert sorted({0, 1, 2, *np.flatnonzero(hits[row] >= 4)}) == words[words >= 0].tolist()


@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_a_search_is_that_of_the_package(script: Any, penalty: float) -> None:
    from translating.model import Sizes, Translator
    from translating.search import Search, encoded
    from translating.vocabulary import BOS, EOS, Sentences

    torch.manual_seed(0)
    model = Translator(Sizes(40, 50, 8, 16)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that hypotheses differ
    sources = Sentences([np.arange(2 + n, 7 + 2 * n, dtype=np.int32) for n in range(3)])
    way = script.heads.by_torch(model.output.weight.detach(), 5)
    sentences = encoded(model, sources, np.arange(3), "cpu")
    search = Search(model, way.head, beam=5, length=12, memory=sentences.memory.shape[1], penalty=penalty)
    found = search(sentences, range(3))

    class Head:
        vocab = 50

        def topk(self, hidden: torch.Tensor, n: int, *, sentences: int, log: bool) -> Any:
            return *way.head(hidden), None

    def step(words: torch.Tensor, state: Any) -> Any:
        (h, c), memory, keys, padding = state
        inputs = model.embed_target(words)[None]
        out, (h, c) = model.decoder(inputs, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        hidden = model.look(out[0][:, None], keys, memory, padding[:, None])[:, 0]
        return hidden, ((h.transpose(0, 1), c.transpose(0, 1)), memory, keys, padding)

    state = ((sentences.state.transpose(0, 1), sentences.cell.transpose(0, 1)),
             sentences.memory, sentences.keys, sentences.padding)  # fmt: skip
    with torch.no_grad():
        wanted = tvm_sparse.beam_search(
            step, Head(), torch.full((3,), BOS), state=state, beam=5, length=12, eos=EOS, length_penalty=penalty
        )
    for number in range(3):
        words = wanted.sequences[number, 0, : wanted.lengths[number, 0]].tolist()
        assert found.sentences[number] == [word for word in words if word != EOS]
        assert abs(found.scores[number] - float(wanted.scores[number, 0])) < 1e-4


# ---- the whole way -----------------------------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in path.read_text().splitlines() if line[:2] != "# "))


@pytest.mark.timeout(280)
def test_the_whole_way(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("babel")
    rng = np.random.default_rng(2)
    sources = sorted({sentence(rng) for _ in range(500)})
    files = {"locale/de/LC_MESSAGES/all.po": catalogue([(s, translated(s)) for s in sources])}
    (tmp_path / "packages").mkdir()
    wheel(tmp_path / "packages" / "invented-1.0-py3-none-any.whl", files)
    out, name = tmp_path / "de", "corpus-de.tsv.xz"
    script.data(tmp_path / "packages", tmp_path, ["de"], tmp_path / "packages.csv")
    assert rows(tmp_path / "packages.csv")[0]["de"] == str(len(sources))

    sizes: dict[str, Any] = {"vocab": 340, "width": 24, "hidden": 48, "dropout": 0.0, "rate": 6e-3, "words": 150}
    script.train_command(
        tmp_path / name, out, "cpu", seconds=120.0, steps=240, **sizes, csv_path=tmp_path / "train.csv"
    )
    curve = [float(row["dev_loss"]) for row in rows(tmp_path / "train.csv")]
    assert curve[-1] < 0.7 * curve[0]

    script.decode(
        tmp_path / name, out, "cpu", seconds=200.0, sentences=2, beams="2", recalls="",
        csv_path=tmp_path / "decode.csv",
    )  # fmt: skip
    lines = rows(tmp_path / "decode.csv")
    by_head = {row["head"]: row for row in reversed(lines) if row["beam"] == "12"}
    assert {"torch", "exact head", "LSH", "TOP", "WA"} <= by_head.keys()
    assert {row["head"] for row in lines if row["beam"] == "2"} == {"torch", "exact head", "LSH"}
    assert all(float(row["head_us"]) > 0 and float(row["words_per_second"]) > 0 for row in lines)
    assert float(by_head["exact head"]["recall_12"]) == 1
    few = [row for row in lines if row["head"] == "TOP"]
    shares = [float(row["candidates"]) for row in few]
    recalls = [float(row["recall_12"]) for row in few]
    assert shares == sorted(shares) and recalls == sorted(recalls) and recalls[-1] == 1

    # Two heads more beside those of the file.
    kept = {(row["head"], row["setting"], row["beam"]): row for row in lines if row["head"] not in ("TOP", "WA")}
    for group in ("TOP", "WA"):
        script.decode(
            tmp_path / name, out, "cpu", seconds=200.0, sentences=2, beams="", only=[group], more=group == "WA",
            csv_path=tmp_path / "more.csv",
        )  # fmt: skip
    script.join(tmp_path / "decode.csv", [tmp_path / "more.csv"])
    assert rows(tmp_path / "decode.csv") == lines  # all of them are there already
    script.join(tmp_path / "more.csv", [tmp_path / "decode.csv"])
    assert len(rows(tmp_path / "more.csv")) == len(lines)
    again = {(row["head"], row["setting"], row["beam"]): row for row in rows(tmp_path / "more.csv")[:9]}
    assert {head for head, *_ in again} == {"torch", "exact head", "TOP", "WA"}
    assert all(one["bleu"] == kept[key]["bleu"] for key, one in again.items() if key in kept)

    script.prune(
        tmp_path / name, out, "cpu", method=["row_balanced"], densities="0.25", steps=12, seconds=60.0,
        sentences=2, shapes="1x4", csv_path=tmp_path / "prune.csv",
    )  # fmt: skip
    lines = rows(tmp_path / "prune.csv")
    assert [float(row["stored_density"]) for row in lines if row["stored_density"]] == [1, 0.25]
    assert [row["sentences"] for row in lines if row["stored_density"]] == ["2", "2"]
    timed = [row for row in lines if row["layer"]]
    assert [row["density"] for row in timed] == ["1", "0.25"] and all(float(row["difference"]) < 1e-4 for row in timed)

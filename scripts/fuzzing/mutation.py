"""Mutation of valid inputs: of bytes, of JSON values, and by crossing two of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

VALUES = (
    None, True, False, 0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**48, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e-320, 1e308,
    "", "x", "x" * 5000, "../x", "/dev/zero", "\0", "é\u2028", "float32", "1e400", [], {}, [[]], [0] * 200, {"": None},
)  # fmt: skip


def mutated(data: bytes, others: list[bytes], rng: random.Random, structured: bool) -> bytes:
    """A mutated input, made from this one, or from it and another."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if structured and rng.random() < 0.7:
            data = _other_value(data, others, rng)
        else:
            data = _other_bytes(data, others, rng)
    return data[: 1 << 16]


def _other_bytes(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    end = min(end, at + rng.choice((1, 2, 8, 64)))
    match rng.randrange(7):
        case 0:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 1 if data:
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + data[at:end] * rng.choice((2, 3, 100)) + data[end:]
        case 4:
            return (
                data[:at]
                + rng.choice(
                    (b"-1", b"0", b"99999999999999999999", b"nan", b"1e999", b'"', b"[", b"]", b"\n", b"\0", b"=", b",")
                )
                + data[end:]
            )
        case 5:
            other = rng.choice(others)
            there = rng.randrange(len(other) + 1)
            return data[:at] + other[there : there + rng.choice((4, 32, 256))] + data[end:]
        case _:
            return data[:at]


def _other_value(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """The input with one value of its JSON, or of one of its JSON lines, replaced, removed, doubled or moved."""
    lines = data.split(b"\n") if b"\n{" in data or b"\n[" in data else [data]
    which = rng.randrange(len(lines))
    try:
        content = json.loads(lines[which])
    except (ValueError, RecursionError):
        return data
    places = list(_places(content))
    if not places:
        return data
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        case 2:
            del holder[key]
        case 3:
            other, theirs = rng.choice(places)
            holder[key] = copy.deepcopy(other[theirs])
        case 4 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        case _:
            value = holder[key]
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                holder[key] = [value]
            elif isinstance(value, str):
                at = rng.randrange(len(value) + 1)
                holder[key] = value[:at] + rng.choice(("0", "9" * 30, "=", ",", "/", "-1", "x")) + value[at + 1 :]
            else:
                holder[key] = rng.choice((-value, value + 1, value * 1000, value / 3))
    try:
        lines[which] = json.dumps(content).encode()
    except (ValueError, RecursionError):
        return data
    return b"\n".join(lines)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a JSON document, as its container and its key or index."""
    waiting = [content]
    while waiting:
        holder = waiting.pop()
        keys: Any = (
            holder.keys() if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        )
        for key in list(keys):
            yield holder, key
            waiting.append(holder[key])

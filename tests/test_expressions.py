"""Spaces of somebody else's files (T1): what their expressions mean, what is refused, and how many points they have."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tvm_sparse.cli.app import app
from tvm_sparse.records import exchange, expressions
from tvm_sparse.records.expressions import ExpressionError, evaluated


def write(path: Path, values: dict[str, object], conditions: tuple[object, ...] = ()) -> Path:
    parameters = [{"Name": name, "Type": "int", "Values": given} for name, given in values.items()]
    space = {"TuningParameters": parameters, "Conditions": [{"Expression": text} for text in conditions]}
    path.write_text(json.dumps({"ConfigurationSpace": space}))
    return path


# Forms in which the community writes values. What each means, Python itself says: these are trusted.
FORMS = (
    "[1, 2, 4]", "(8, 16)", "list(range(1, 9))", "range(32, 1001, 32)", "[1, 2] + list(range(32, 1024+1, 32))",
    "[2**i for i in range(0, 6)]", "[1] + [2*i for i in range(1,11)]", "[i for i in range(1, 10+1) if i % 3 != 0]",
    "[x * y for x in (1, 2) for y in [3, 5] if x != y]", "['a', 'b'] + ['c' * 2]", "[1.5, -2, +3, True]",
    "sorted([3, 1, 2])", "[*range(3), 7]", "[len(range(10**9)), sum([1, 2]), max(3, 4), min([5, 6]), abs(-7)]",
    "[1 << i for i in range(5)]", "[x if x > 2 else 10 - x for x in range(5)]", "[a + b for a, b in [(1, 2), (3, 4)]]",
    "[x for x in range(20) if 3 < x <= 9 and not x == 5 or x in (11, 12)]", "[7 // 2, 7 / 2, 7 % 4, 6 & 3, 6 | 3]",
    "[6 ^ 3, ~5, 40 >> 2]", "list(reversed([1, 2, 3]))", "[int('8'), round(2.6), int(all([1, 2])), int(any([]))]",
)  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_values_mean_what_they_mean_in_python(text: str, tmp_path: Path) -> None:
    expected = list(eval(text))
    assert list(evaluated(text)) == expected
    found = exchange.read_inputs(write(tmp_path / "space.json", {"x": text}))
    assert found.table["x"] == tuple(expected) and found.product == len(expected)


REFUSED = (
    "__import__('os').getcwd()", "().__class__", "open('x')", "[x for x in y]", "lambda: 1", "f'{1}'", "'%d' % 7",
    "[1] * 10**9", "'a' * 10**9", "9**9**9", "1 << 10**9", "[i for i in range(10**9)]", "list(range(10**9))",
    "sum(sum(range(99999)) for i in range(99999))", "[i for i in range(30000) for j in range(30000)]",
    "[" * 900 + "]" * 900, "round(1, -10**9)", "range(1, 2, 0)", "1 / 0", "[1][0]", "{1: 2}", "x := 3", "(1 +", "",
    "max()", "sorted([1, 'a'])", "[(i := 1) for j in (1,)]", "print(1)", "[].append(1)", "2 in 3", "1 if x else 2",
    "list(range(99999)) + list(range(99999))", "all(0 in list(range(99999)) for i in range(9999))", "b'a'", "...",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_is_more_or_too_much_is_refused_in_no_time(text: str, tmp_path: Path) -> None:
    begun = time.process_time()
    with pytest.raises(ExpressionError):
        evaluated(text)
    assert time.process_time() - begun < 10
    with pytest.raises(exchange.ExchangeError, match="parameter x: values"):
        exchange.read_inputs(write(tmp_path / "space.json", {"x": text}))


@pytest.mark.parametrize("given", [[], "[]", [[1]], "[[1], [2]]", "3", None, 7, {"a": 1}, [None]], ids=str)
def test_values_are_a_list_of_numbers_and_texts(given: object, tmp_path: Path) -> None:
    with pytest.raises(exchange.ExchangeError, match="parameter x: expected"):
        exchange.read_inputs(write(tmp_path / "space.json", {"x": given}))


TERMS = (
    "a * b <= 12",
    "b % 3 == 1",
    "c < d or d == 2",
    "a + c != 7",
    "d > 1",
    "e == 0 or a > 2",
    "1 < 2",
    "b / (a - 2) > 0",
)


@pytest.mark.parametrize("seed", range(6))
def test_points_are_counted_as_if_all_were_gone_through(seed: int, tmp_path: Path) -> None:
    """Also where groups of parameters are counted apart, and where an earlier condition guards a later one."""
    draw = random.Random(seed)
    values = {name: [draw.randint(0, 6) for _ in range(draw.randint(1, 4))] for name in "abcdef"}
    drawn_terms = draw.sample(TERMS, draw.randint(1, 5))
    if seed >= 4:  # a condition without parameters that leaves nothing to those after it
        drawn_terms.insert(draw.randint(0, len(drawn_terms) - 1), "2 < 1")
    conditions = ("a != 2", *drawn_terms)
    found = exchange.read_inputs(write(tmp_path / "space.json", values, conditions))
    expected = dict.fromkeys(conditions, 0)
    for point in itertools.product(*values.values()):
        scope = dict(zip(values, point, strict=True))
        text = next((text for text in conditions if not eval(text, {}, dict(scope))), None)
        if text is not None:
            expected[text] += 1
    assert found.refused() == expected
    allowed, drawn = found.sampled(300, seed)
    assert drawn == 300 and abs(allowed / drawn - 1 + sum(expected.values()) / found.product) < 0.15


def test_a_condition_that_cannot_be_evaluated_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "space.json", {"a": [0, 1], "b": [1, 2]}, ("b % a == 0",))
    with pytest.raises(exchange.ExchangeError, match="'b % a == 0' cannot be evaluated: ZeroDivisionError"):
        exchange.read_inputs(path).refused()


def test_a_large_space_is_counted_or_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10^12 points: exactly where conditions connect few parameters, else a share with its interval, and why."""
    values = {f"p{i}": "list(range(1, 101))" for i in range(6)}

    def shown(*conditions: str) -> tuple[str, str]:
        path = write(tmp_path / "space.json", dict(values), conditions)
        result = CliRunner().invoke(app, ["space", str(path)], env={"COLUMNS": "160"})
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split()), result.stderr

    text, note = shown("p0 < p1", "p2 > 50")
    assert f"{100**4 * 4950 // 2:,} of {100**6:,} points" in text  # half of p2's, and of pairs those in order
    assert f"counting which of {100**6:,} combinations" in note
    text, _ = shown("p0 + p1 + p2 + p3 + p4 + p5 <= 303")
    assert "95 % confidence" in text and "connect p0, p1, p2, p3, p4, p5" in text
    monkeypatch.setattr(exchange, "MOST_EVALUATIONS", 100)
    assert "at most 100 are gone through" in shown("p0 < p1")[0]


def test_the_limits_of_a_text_hold() -> None:
    with pytest.raises(ExpressionError, match="characters; expected at most"):
        evaluated("1" * (expressions.MOST_TEXT + 1))
    with pytest.raises(ExpressionError, match="more than 1,000 operations"):
        expressions.condition("a" + " * a" * 2000 + " > 1", {"a": (2,)})

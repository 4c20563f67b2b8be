"""Expressions in foreign files, in Python's notation: only the operations listed here are evaluated.

There are two kinds. *Values* of a parameter, as ``[1] + list(range(32, 1025, 32))`` or ``[2**i for i in range(6)]``,
are evaluated node by node, with bounds on steps, sizes and numbers. *Conditions* on parameters, as ``x * y <= 1024 or z
== 0``, are evaluated millions of times: their nodes are checked against a list without expensive operations, and then
they are compiled.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 1_000_000  # nodes evaluated, and items that functions and operators iterate over
MOST_ITEMS = 100_000  # in a list, or characters in a text
MOST_BITS = 256  # of an integer
MOST_DIGITS = 20  # kept by `round`
MOST_TEXT = 1 << 20


class ExpressionError(ValueError):
    """An expression that is not supported or exceeds a bound; the message says which part."""


# ------------------------------------------------------------------------------------------------- bounded operations


def _number(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ExpressionError(f"a number of {value.bit_length()} bits; expected at most {MOST_BITS}")
    return value


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple | set | range) and len(value) > MOST_ITEMS:
        raise ExpressionError(f"{len(value):,} items; expected at most {MOST_ITEMS:,}")
    return value


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * max(exponent, 0) > MOST_BITS:
        raise ExpressionError(f"{base}**{exponent} has more than {MOST_BITS} bits")
    return base**exponent


def _shifted(value: Any, bits: Any) -> Any:
    if isinstance(bits, int) and bits > MOST_BITS:
        raise ExpressionError(f"a shift by {bits} bits; expected at most {MOST_BITS}")
    return value << bits


def _times(one: Any, other: Any) -> Any:
    for sequence, count in ((one, other), (other, one)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int) and len(sequence) * count > MOST_ITEMS:
            raise ExpressionError(f"{len(sequence):,} items {count:,} times; expected at most {MOST_ITEMS:,}")
    return one * other


def _remainder(one: Any, other: Any) -> Any:
    if isinstance(one, str):  # a format, whose width can be any number
        raise ExpressionError("% of a text is not understood")
    return one % other


def _rounded(value: Any, digits: Any = None) -> Any:
    if digits is not None and not (isinstance(digits, int) and abs(digits) <= MOST_DIGITS):
        raise ExpressionError(f"round: expected at most {MOST_DIGITS} digits, got {digits!r}")
    return round(value, digits)


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _remainder,
    ast.Pow: _power,
    ast.LShift: _shifted,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, others: one in others,
    ast.NotIn: lambda one, others: one not in others,
}
# Operations on numbers, in both kinds of expression.
_SCALARS: Mapping[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "int": int, "float": float, "round": _rounded,
}  # fmt: skip
# Operations on sequences, in values alone.
_SEQUENCES: Mapping[str, Callable[..., Any]] = {
    "range": range, "list": list, "tuple": tuple, "set": set, "sorted": sorted, "reversed": lambda values: values[::-1],
    "sum": sum, "len": len, "all": all, "any": any, "str": str, "bool": bool,
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- values


@dataclass
class _Budget:
    steps: int = MOST_STEPS

    def spend(self, *values: Any) -> None:
        """Count one step, and one more for each item of these values."""
        self.steps -= 1 + sum(len(value) for value in values if isinstance(value, str | list | tuple | range))
        if self.steps < 0:
            raise ExpressionError(f"it takes more than {MOST_STEPS:,} steps")


def evaluated(text: str, names: Mapping[str, Any] | None = None) -> Any:
    """The value of an expression: numbers, texts and lists of them, from arithmetic, comprehensions and a few
    functions.

    Raises
    ------
    ExpressionError
        For anything else, and where a bound is exceeded.
    """
    tree = _parsed(text)
    try:
        return _value(tree.body, dict(names or {}), _Budget())
    except ExpressionError:
        raise
    except (TypeError, ValueError, ArithmeticError, RecursionError, LookupError, AttributeError) as error:
        raise ExpressionError(f"{type(error).__name__}: {error}") from error


def _parsed(text: Any) -> ast.Expression:
    if not isinstance(text, str):
        raise ExpressionError(f"expected a text, got {type(text).__name__}")
    if len(text) > MOST_TEXT:
        raise ExpressionError(f"{len(text):,} characters; expected at most {MOST_TEXT:,}")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(str(error) or type(error).__name__) from error


def _value(node: ast.expr, scope: Mapping[str, Any], budget: _Budget) -> Any:
    budget.spend()

    def of(part: ast.expr) -> Any:
        return _value(part, scope, budget)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return _sized(_number(value))
        case ast.Name(id=name) if name in scope:
            return scope[name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return (tuple if isinstance(node, ast.Tuple) else list)(_elements(parts, scope, budget))
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            made = list(_comprehended(node.elt, node.generators, scope, budget))
            return list(dict.fromkeys(made)) if isinstance(node, ast.SetComp) else made
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            found = _sized(_number(_BINARY[type(op)](of(left), of(right))))
            budget.spend(found)
            return found
        case ast.UnaryOp(op=unary, operand=operand) if type(unary) in _UNARY:
            return _UNARY[type(unary)](of(operand))
        case ast.BoolOp(op=both, values=parts):
            for part in parts[:-1]:
                if bool(value := of(part)) != isinstance(both, ast.And):
                    return value
            return of(parts[-1])
        case ast.Compare(left=left, ops=ops, comparators=parts) if all(type(op) in _COMPARED for op in ops):
            one = of(left)
            for compared, part in zip(ops, parts, strict=True):
                other = of(part)
                budget.spend(one, other)
                if not _COMPARED[type(compared)](one, other):
                    return False
                one = other
            return True
        case ast.IfExp(test=test, body=body, orelse=other):
            return of(body) if of(test) else of(other)
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _SCALARS or name in _SEQUENCES:
            arguments = list(_elements(parts, scope, budget))
            if name != "len":  # a range is not a list yet
                arguments = arguments if name == "range" else [_sized(argument) for argument in arguments]
                budget.spend(*arguments)
            found = {**_SCALARS, **_SEQUENCES}[name](*arguments)
            if isinstance(found, set):  # in an order that does not depend on hashes
                found = list(dict.fromkeys(arguments[0]))
            return _number(found)
    raise ExpressionError(f"{ast.unparse(node)[:60]!r} is not understood")


def _elements(parts: Iterable[ast.expr], scope: Mapping[str, Any], budget: _Budget) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, ast.Starred):
            yield from _sized(_value(part.value, scope, budget))
        else:
            yield _value(part, scope, budget)


def _comprehended(
    element: ast.expr, loops: list[ast.comprehension], scope: Mapping[str, Any], budget: _Budget
) -> Iterator[Any]:
    if not loops:
        yield _value(element, scope, budget)
        return
    loop, *inner = loops
    if loop.is_async:
        raise ExpressionError("an asynchronous comprehension is not understood")
    for item in _sized(_value(loop.iter, scope, budget)):
        own = {**scope, **_bound(loop.target, item)}
        if all(_value(condition, own, budget) for condition in loop.ifs):
            yield from _comprehended(element, inner, own, budget)


def _bound(target: ast.expr, item: Any) -> dict[str, Any]:
    """The names that a comprehension's loop binds, for one element."""
    if isinstance(target, ast.Name):
        return {target.id: item}
    if isinstance(target, ast.Tuple) and isinstance(item, tuple | list) and len(item) == len(target.elts):
        return {name: value for part, one in zip(target.elts, item, strict=True) for name, value in
                _bound(part, one).items()}  # fmt: skip
    raise ExpressionError(f"{ast.unparse(target)[:60]!r} is no name for an element")


# --------------------------------------------------------------------------------------------------------- conditions

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor)
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Tuple, ast.List, ast.IfExp, ast.Call),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Compare, *_COMPARED),
    *(ast.BinOp, *_ARITHMETIC),
)
MOST_OPERATIONS = 1_000  # in a condition: each may multiply the length of a number


@dataclass(frozen=True)
class Condition:
    """A condition on parameters.

    Attributes
    ----------
    text
        The condition as written in the file.
    parameters
        The parameters that it names, in the order of the space.
    function
        Takes the parameters' values in this order and returns whether the point is allowed. It raises `TypeError`,
        `ValueError` or `ArithmeticError` where it cannot be evaluated, as where it divides by zero.
    """

    text: str
    parameters: tuple[str, ...]
    function: Callable[..., Any]


def condition(text: Any, table: Mapping[str, Iterable[Any]]) -> Condition:
    """A condition on the parameters of a table, compiled; `&&` and `||` are read as in C.

    Raises
    ------
    ExpressionError
        If it is more than arithmetic and comparisons of parameters.
    """
    tree = _parsed(text.replace("&&", " and ").replace("||", " or ") if isinstance(text, str) else text)
    numbers = {name for name, values in table.items() if all(isinstance(value, int | float) for value in values)}
    operations = 0
    for node in ast.walk(tree):
        known = isinstance(node, _NODES) and not (isinstance(node, ast.Call) and node.keywords)
        if isinstance(node, ast.Call):
            known &= isinstance(node.func, ast.Name) and node.func.id in _SCALARS
        if isinstance(node, ast.Name):
            known &= node.id in table or node.id in _SCALARS
        if isinstance(node, ast.Constant):
            known &= isinstance(node.value, int | float | str | bool)
        if isinstance(node, ast.BinOp):  # a text or list times a number is as long as the number is large
            operations += 1
            if operations > MOST_OPERATIONS:
                raise ExpressionError(f"more than {MOST_OPERATIONS:,} operations")
            inner = list(ast.walk(node))
            known &= not any(isinstance(one, ast.Tuple | ast.List) for one in inner)
            known &= all(isinstance(one.value, int | float) for one in inner if isinstance(one, ast.Constant))
            known &= all(one.id in numbers or one.id in _SCALARS for one in inner if isinstance(one, ast.Name))
        if not known:
            what = node.id if isinstance(node, ast.Name) else type(node).__name__
            raise ExpressionError(f"{what} is not understood")
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    parameters = tuple(name for name in table if name in named)
    arguments = ast.arguments([], [ast.arg(name) for name in parameters], None, [], [], None, [])
    function = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, tree.body)))
    scope = {"__builtins__": {}, **_SCALARS}
    try:
        return Condition(text, parameters, eval(compile(function, "<condition>", "eval"), scope))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(str(error) or type(error).__name__) from error

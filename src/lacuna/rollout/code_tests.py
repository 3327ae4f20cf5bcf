"""Tests of code as rows of data have them: asserts, and inputs with the outputs that are right."""

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_RELATIONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda value, others: value in others,
    ast.NotIn: lambda value, others: value not in others,
}


@dataclass(frozen=True)
class Part:
    """A part of a row's tests, in order.

    Attributes:
        source: what is computed (an expression, if it is judged) or run.
        judge: says whether the value of the expression is right, outside of the process that runs
            the code; None for what is only run.
        is_test: whether it counts; else it prepares those that do.
    """

    source: str
    judge: Callable[[Any], bool] | None = None
    is_test: bool = True


@dataclass(frozen=True)
class Pair:
    """An input and the output that is right for it."""

    given: str
    wanted: str

    def accepts(self, output: str) -> bool:
        """Whether an output is the same but for blanks at the ends of lines and of all."""
        return _lines(output) == _lines(self.wanted)


def read_tests(column: Any) -> list[Part] | list[Pair]:
    """The tests of a row.

    They are a list of asserts, or a text of them; a list of {"input", "output"}; or {"inputs",
    "outputs"} with as many of both; or one of these as JSON. Raises `ValueError` for what is none.
    """
    if isinstance(column, str):
        is_json = column.lstrip()[:1] in ("[", "{")
        return read_tests(json.loads(column)) if is_json else _parts([column])
    if isinstance(column, Mapping):
        return _pairs(column)
    if isinstance(column, Sequence):
        if all(isinstance(one, str) for one in column):
            return _parts(column)
        if all(isinstance(one, Mapping) for one in column):
            return [pair for one in column for pair in _pairs(one)]
    raise ValueError(
        "its tests are no list of asserts, nor of pairs of input and output, but "
        f"{type(column).__name__}"
    )


def _pairs(tests: Mapping[str, Any]) -> list[Pair]:
    kind = tests.get("testtype") or tests.get("type") or "stdin"
    if tests.get("fn_name") or kind not in ("stdin", "stdin_stdout"):
        raise ValueError("its tests call a function by its name: write them as asserts")
    given = tests.get("inputs", tests.get("input"))
    wanted = tests.get("outputs", tests.get("output"))
    if given is None or wanted is None:
        raise ValueError(f"its tests have no inputs with outputs, but {', '.join(tests)}")
    if isinstance(given, str) and isinstance(wanted, str):
        given, wanted = [given], [wanted]
    if len(given) != len(wanted):
        raise ValueError(f"its tests have {len(given)} inputs and {len(wanted)} outputs")
    return [Pair(*map(_text, pair)) for pair in zip(given, wanted, strict=True)]


def _text(value: Any) -> str:
    """An input or output; one of lines as a text."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    raise ValueError(f"an input or output is {type(value).__name__}, not text")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _parts(sources: Sequence[str]) -> list[Part]:
    """Statements that assert are tests; where only functions do, calls are. All others prepare."""
    statements = []
    for source in sources:
        try:
            statements += ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ValueError(f"its test {source[:80]!r} is no Python: {error}") from error
    is_test = [_asserts(one) for one in statements]
    all_nodes = [node for one in statements for node in ast.walk(one)]
    if not any(is_test) and any(isinstance(node, ast.Assert) for node in all_nodes):
        is_test = [
            isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) for one in statements
        ]
    if statements and not any(is_test):
        raise ValueError("its tests have no assert, and do not call the functions that have")
    pairs = zip(statements, is_test, strict=True)
    return [_part(one) if counts else Part(ast.unparse(one), None, False) for one, counts in pairs]


def _asserts(node: ast.AST) -> bool:
    """Whether running a statement asserts something, functions that it calls left aside."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    return isinstance(node, ast.Assert) or any(map(_asserts, ast.iter_child_nodes(node)))


def _part(statement: ast.stmt) -> Part:
    """A test; what compares with a constant is taken apart, so that the code never sees that."""
    if not isinstance(statement, ast.Assert):
        return Part(ast.unparse(statement))
    asked = statement.test
    if isinstance(asked, ast.Compare) and len(asked.ops) == 1:
        relation = _RELATIONS[type(asked.ops[0])]
        left, right = asked.left, asked.comparators[0]
        if _is_constant(right):
            wanted = ast.literal_eval(right)
            return Part(ast.unparse(left), lambda value: bool(relation(value, wanted)))
        if _is_constant(left):
            wanted = ast.literal_eval(left)
            return Part(ast.unparse(right), lambda value: bool(relation(wanted, value)))
    return Part(f"not not ({ast.unparse(asked)})", lambda value: value is True)


def _is_constant(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def value_of(told: Any) -> Any:
    """The value that `plain` of `rollout/shut_in.py` told.

    Raises `ValueError` or `TypeError` for what it cannot have told: the code may have written it.
    """
    kind, content = told
    if kind == "constant":
        return None if content is None else bool(content)
    if kind == "dict":
        return {value_of(key): value_of(one) for key, one in content}
    if kind in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": frozenset}[kind](map(value_of, content))
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "fraction":
        return Fraction(*(int(part, 16) for part in content))
    readers: dict[str, Callable[[str], Any]] = {
        "int": lambda text: int(text, 16),
        "float": float.fromhex,
        "str": str,
        "bytes": bytes.fromhex,
    }
    if kind not in readers:
        raise ValueError(f"{kind!r} is no kind of value")
    return readers[kind](content)

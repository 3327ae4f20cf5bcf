"""`lacuna bloat`: counts the package's lines of code, by folder."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

LIMIT = 5000
_NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Lines that hold code: not blank, not comment, not docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:  # a bare string documents what stands before it, as in the settings
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    documented |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def run(words: Sequence[str]) -> int:
    """Prints lines of code by folder and their sum; status 1 when the limit is passed."""
    if any(word in ("-h", "--help") for word in words):
        print("usage: lacuna bloat\n\nCounts the package's lines of code (no blanks, comments, docstrings) by folder.")
        return 0
    package = Path(__file__).parent.parent
    counts: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        folder = path.relative_to(package).parts[0] if path.parent != package else "."
        counts[folder] += code_lines(path.read_text())
    for folder, count in sorted(counts.items()):
        print(f"{folder:<12} {count:>6,}")
    total = sum(counts.values())
    print(f"{'total':<12} {total:>6,} of {LIMIT:,}")
    return 0 if total < LIMIT else 1

"""`lacuna bloat`: counts the package's lines of code (no blanks, comments, docstrings), by folder."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lacuna.commands.arguments import CommandParser

LIMIT = 5000
_NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Lines that hold code: not blank, not comment, not docstring (any string that is a statement of its own)."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in _NOT_CODE]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    expressions = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    texts = [value for value in expressions if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return len(code - {line for text in texts for line in range(text.lineno, text.end_lineno + 1)})


def run(words: Sequence[str]) -> int:
    """Prints lines of code by folder and their sum; status 1 when the limit is passed."""
    CommandParser(prog="lacuna bloat", description=__doc__).parse_args(list(words))
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

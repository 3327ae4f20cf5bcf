"""`lacuna inspect MODEL`: attention sinks, sparsity and large activations, layer by layer."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lacuna.commands.arguments import TRUST, CommandParser
from lacuna.config import UserError, explained
from lacuna.config.errors import require_writable

if TYPE_CHECKING:
    from lacuna.rollout.inspection import Layer

ABOUT = """Reads texts with a model and tells of each layer how much its heads attend to the first
token, how many weights of attention are 0, and how large its hidden states are. The picture has a
square for each head, the darker the more it attends to the first token."""
_CELL = 16  # pixels


def _build_parser() -> CommandParser:
    parser = CommandParser(prog="lacuna inspect", description=ABOUT)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a model or an adapter, Hub id, checkpoint step, run folder or .gguf file",
    )
    parser.add_argument(
        "--data",
        help="a text, or JSON lines with a column text; default: lacuna's own source code",
    )
    parser.add_argument("--rows", type=int, default=8, help="rows that are read; default: 8")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row; default: 512")
    parser.add_argument("--picture", help="write a heat map of the heads to this .svg file")
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument(
        "--trust-remote-code", "--trust_remote_code", action="store_true", help=TRUST
    )
    return parser


def run(words: list[str]) -> None:
    """Runs the command."""
    given = _build_parser().parse_args(words)
    if given.rows < 1 or given.tokens < 2:
        raise UserError("inspect: --rows must be at least 1 and --tokens at least 2.")
    if given.picture and not given.picture.endswith(".svg"):
        raise UserError(f"inspect: --picture {given.picture}: name a file that ends in .svg.")
    for option in ("picture", "json"):
        _require_place(getattr(given, option), f"inspect: --{option}")
    text = _read_text(given.data)
    # torch takes seconds to import, so the arguments are checked first.
    import torch

    from lacuna.formats.opening import load_any_model
    from lacuna.parallel.processes import device_type
    from lacuna.rollout.inspection import inspect_model

    model, tokenizer = load_any_model(given.model, device_type(), given.trust_remote_code)
    ids = tokenizer(text, add_special_tokens=False).input_ids[: given.rows * given.tokens]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = min(given.tokens, positions or given.tokens, len(ids))
    rows = min(given.rows, len(ids) // max(tokens, 1))
    if tokens < 2:
        raise UserError("inspect: --data has no two tokens: give a longer text.")
    read = torch.tensor(ids[: rows * tokens]).view(rows, tokens)
    layers = inspect_model(model, [*read])
    print(f"{rows} rows of {tokens} tokens, attention {model.config._attn_implementation}")
    print(_table(layers))
    if given.json:
        _write(given.json, json.dumps([asdict(layer) for layer in layers], indent=1))
    if given.picture:
        _write(given.picture, _heat_map(layers))


def _read_text(file: str | None) -> str:
    """The text that is read. Raises `UserError` where the file has none."""
    if file is None:
        sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
        return "\n".join(source.read_text() for source in sources)
    problem = f"inspect: --data: cannot read {file}"
    with explained(problem, OSError, ValueError, KeyError, TypeError, mend="give a text, or rows"):
        text = Path(file).read_text()
        if file.endswith((".jsonl", ".json")):
            text = "\n".join(json.loads(line)["text"] for line in text.splitlines() if line)
    return text


def _require_place(file: str | None, option: str) -> None:
    """Raises `UserError` where the file that an option names could not be written."""
    if file and Path(file).is_dir():
        raise UserError(f"{option}: {file} is a folder; name a file.")
    if file:
        require_writable(str(Path(file).parent), option)


def _write(file: str, text: str) -> None:
    with explained(f"inspect: cannot write {file}", OSError, mend="choose another place"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)


def _table(layers: "list[Layer]") -> str:
    """The numbers of each layer, and their means, or the largest of the largest values."""
    from lacuna.rollout.inspection import numbers_of, summary_of

    heads = "layer  first token  sinks>0.2  sinks>0.3  sparsity   kurtosis    largest"
    lines = [_line(str(place), numbers_of(layer)) for place, layer in enumerate(layers)]
    return "\n".join([heads, *lines, _line("all", summary_of(layers))])


def _line(name: str, numbers: dict[str, float]) -> str:
    first, low, high, sparsity, kurtosis, largest = numbers.values()
    shares = f"{first:>11.3f}{low:>11.1%}{high:>11.1%}{sparsity:>10.1%}"
    return f"{name:>5}  {shares}{kurtosis:>11.1f}{largest:>11.2f}"


def _heat_map(layers: "list[Layer]") -> str:
    """An SVG with a row of squares for each layer, one for each head, dark at attention 1."""
    widest = max(len(layer.first) for layer in layers)
    size = f'width="{(widest + 3) * _CELL}" height="{(len(layers) + 2) * _CELL}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="10">']
    parts.append(f'<text x="2" y="{_CELL - 4}">mean attention on the first token</text>')
    for place, layer in enumerate(layers):
        top = (place + 1) * _CELL
        parts.append(f'<text x="2" y="{top + _CELL - 4}">{place}</text>')
        for head, share in enumerate(layer.first):
            shade = round(255 * (1 - min(max(share, 0.0), 1.0)))
            place_of = f'x="{(head + 2) * _CELL}" y="{top}" width="{_CELL - 1}"'
            told = f"<title>layer {place}, head {head}: {share:.3f}</title>"
            fill = f"rgb({shade},{shade},255)"
            parts.append(
                f'<rect {place_of} height="{_CELL - 1}" fill="{fill}" stroke="#ccc">{told}</rect>'
            )
    return "\n".join([*parts, "</svg>"])

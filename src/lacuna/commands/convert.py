"""`lacuna convert SOURCE TARGET --to hf|dcp|gguf`: between checkpoints, adapters, models and GGUF.

flame's modules and their equivalents:
  python -m flame.utils.convert_dcp_to_hf --path RUN --step N ...
  lacuna convert RUN/checkpoint/step-N TARGET --to hf

  python -m flame.utils.convert_hf_to_dcp --model HF --checkpoint RUN/checkpoint/step-0
  lacuna convert HF RUN/checkpoint/step-0 --to dcp
A run whose checkpoint folder holds a step-0 starts from its weights.
"""

import os
from argparse import Namespace, RawDescriptionHelpFormatter

from lacuna.commands.arguments import TRUST, CommandParser
from lacuna.config import UserError

GGUF_TYPES = (
    "type of the weights in GGUF: F16 (default), BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, or one of "
    "llama-quantize's"
)


def _build_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="lacuna convert", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="run folder, checkpoint, adapter, HF folder or id, .gguf file",
    )
    parser.add_argument("target", metavar="TARGET", help="folder or file to write; must not exist")
    parser.add_argument(
        "--to", required=True, choices=("hf", "dcp", "gguf"), help="the form wanted"
    )
    parser.add_argument(
        "--base", help="model to merge adapters into, instead of the one they were trained beside"
    )
    parser.add_argument(
        "--adapter-only", "--adapter_only", action="store_true", help="write adapters, not merged"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; default: unchanged",
    )
    parser.add_argument("--type", metavar="TYPE", help=GGUF_TYPES)
    parser.add_argument(
        "--trust-remote-code", "--trust_remote_code", action="store_true", help=TRUST
    )
    return parser


def _check_options(given: Namespace) -> None:
    """Raises `UserError` for options that do not go together, or a target that exists already."""
    if given.type is not None and given.to != "gguf":
        raise UserError("convert: --type is for --to gguf; others take --dtype.")
    if given.dtype is not None and given.to == "gguf":
        raise UserError("convert: --to gguf takes --type, not --dtype.")
    if given.dtype is not None and given.adapter_only:
        raise UserError("convert: --dtype is for whole models, not adapters.")
    if given.adapter_only and given.to != "hf":
        raise UserError("convert: --adapter-only is for --to hf; merged adapters go into GGUF.")
    if os.path.exists(given.target):
        raise UserError(
            f"convert: {given.target} exists already: choose another target, or remove it."
        )


def run(words: list[str]) -> None:
    """Runs the command."""
    given = _build_parser().parse_args(words)
    _check_options(given)
    # torch takes seconds to import, so the arguments are checked first.
    from lacuna.formats.convert import convert

    kind = given.dtype
    if given.to == "gguf":
        from lacuna.formats.gguf import require_writable_type

        kind = given.type or "F16"
        require_writable_type(kind)
    settings = (kind, given.base, given.adapter_only, given.trust_remote_code)
    said = convert(given.source, given.target, given.to, *settings)
    print(f"{said}Wrote {given.target}.")

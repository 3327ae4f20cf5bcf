"""`lacuna convert SOURCE TARGET --to hf|dcp`: between lacuna's checkpoints, adapters and Hugging Face folders.

flame's modules and their equivalents:
  python -m flame.utils.convert_dcp_to_hf --path RUN --step N ...   lacuna convert RUN/checkpoint/step-N TARGET --to hf
  python -m flame.utils.convert_hf_to_dcp --model HF --checkpoint RUN/checkpoint/step-0
                                                                    lacuna convert HF RUN/checkpoint/step-0 --to dcp
A run whose checkpoint folder holds a step-0 starts from its weights.
"""

import os
from argparse import RawDescriptionHelpFormatter

from lacuna.commands.arguments import CommandParser
from lacuna.config import UserError


def run(words: list[str]) -> None:
    """Runs the command."""
    parser = CommandParser(prog="lacuna convert", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help="run folder, checkpoint step, adapter, or HF folder or id")
    parser.add_argument("target", metavar="TARGET", help="folder to write; must not exist")
    parser.add_argument("--to", required=True, choices=("hf", "dcp", "gguf"), help="the form wanted")
    parser.add_argument("--base", help="model to merge adapters into, instead of that they were trained beside")
    parser.add_argument("--adapter-only", "--adapter_only", action="store_true", help="write adapters, not merged")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; default: as is")
    given = parser.parse_args(words)
    if given.to == "gguf":
        raise UserError("convert: --to gguf is not available yet.")
    if os.path.exists(given.target):
        raise UserError(f"convert: {given.target} exists already: choose another target, or remove it.")
    from lacuna.train.forms import convert

    said = convert(given.source, given.target, given.to, given.dtype, given.base, given.adapter_only)
    print(f"{said}Wrote {given.target}.")

"""Imports the libraries, once, for the server of forked processes.

They are made as quiet as lacuna's first lines make them.
"""

import importlib
import os

from lacuna.cli import FOR_LIBRARIES

for _name, _value in FOR_LIBRARIES.items():
    os.environ.setdefault(_name, _value)
for _name in (
    "lacuna.commands.train",
    "lacuna.commands.generate",
    "lacuna.commands.convert",
    "lacuna.train.session",
    "transformers.models.llama.modeling_llama",
    "forked",
):
    importlib.import_module(_name)

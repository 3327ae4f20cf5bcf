"""Imports the libraries, once, for the server of forked processes.

They are made as quiet as lacuna's first lines make them.
"""

import importlib

from lacuna.cli import _quiet_libraries

_quiet_libraries()
for _name in (
    "lacuna.commands.train",
    "lacuna.commands.generate",
    "lacuna.commands.convert",
    "lacuna.train.session",
    "transformers.models.llama.modeling_llama",
    "forked",
):
    importlib.import_module(_name)

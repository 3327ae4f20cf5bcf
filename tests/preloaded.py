"""Imports the libraries, once, for the server of forked processes.

They are made as quiet as lacuna's first lines make them.
"""

import gc
import importlib
import os

from lacuna.cli import FOR_LIBRARIES

# Else each process looked through all that they make for garbage, which copies its memory too.
gc.disable()

for _name, _value in FOR_LIBRARIES.items():
    os.environ.setdefault(_name, _value)
for _name in (
    "lacuna.commands.train",
    "lacuna.commands.generate",
    "lacuna.commands.convert",
    "lacuna.train.session",
    "lacuna.data.prompts",
    "lacuna.objective.critic",
    "lacuna.objective.ppo",
    "lacuna.rollout.generate",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "forked",
):
    importlib.import_module(_name)
gc.freeze()
gc.enable()

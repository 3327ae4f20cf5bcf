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
    "lacuna.data.fla_models",
    "lacuna.data.prompts",
    "lacuna.model.added_losses",
    "lacuna.model.few_experts",
    "lacuna.model.parameter_groups",
    "lacuna.model.router_settings",
    "lacuna.objective.critic",
    "lacuna.objective.ppo",
    "lacuna.parallel.experts",
    "lacuna.rollout.generate",
    "lacuna.train.hints",
    "lacuna.train.second",
    "torch._inductor.compile_fx",
    "torch.utils.serialization",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "forked",
    "runs",
    "tasks",
):
    importlib.import_module(_name)
# transformers compiles a thousand patterns for the names of tensors, once in a process.
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping(
    "llama"
)
gc.freeze()
gc.enable()

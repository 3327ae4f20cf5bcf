"""The steps that `lacuna bench --against automodel` left in a folder, made by NeMo AutoModel.

python benchmarks/automodel_steps.py FOLDER
(in several processes by torchrun; `lacuna bench` starts it by itself)

The loop, sharding, precision, compilation, recomputation and loss are its recipe's own, on
transformers' own model (`force_hf`); the weights and the rows are the task's.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import automodel_device  # noqa: F401  (before AutoModel's own parts)
import torch
from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel._transformers import auto_model
from nemo_automodel.components._peft.lora import PeftConfig
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from steps import Task, make_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.data import IterableDataset
from transformers.initialization import no_init_weights

from lacuna.parallel.processes import stop_process


def main() -> None:
    # It wants the variables of torchrun in a single process as well.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        os.environ.setdefault(name, value)
    task = Task(sys.argv[1])
    auto_model._init_model = without_first_values(auto_model._init_model)
    recipe = StepsRecipe(task)
    recipe.setup()
    recipe.load_weights()
    recipe.run_train_validation_loop()
    arguments = described(recipe_settings(task))
    task.write(recipe.losses[0], losses=recipe.losses, arguments=arguments)
    stop_process()


def without_first_values(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a model as `make` does, but draws nothing.

    In a single process it would draw on the CPU, for minutes, what the weights of the task replace.
    """

    def made(*arguments: Any, **named: Any) -> Any:
        with no_init_weights():
            return make(*arguments, **named)

    return made


class Rows(IterableDataset[dict[str, Tensor]]):
    """The micro-batches of this rank."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def shard(self, count: int, index: int) -> "Rows":
        """Itself: other ranks have other rows already."""
        return self


class StepsRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """AutoModel's recipe with the weights of the task, and a clock."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.losses: list[float] = []
        super().__init__(ConfigNode(recipe_settings(task)))

    def load_weights(self) -> None:
        """Gives the model the weights that lacuna's begins with."""
        [model] = self.model_parts
        # Adapters are its own: they add nothing in the first step.
        is_whole = not self.task.settings["lora"]["rank"]
        whole = StateDictOptions(full_state_dict=True, strict=is_whole)
        set_model_state_dict(model, make_model(self.task).state_dict(), options=whole)
        gc.collect()
        for module in model.modules():
            # gloo, which tests reduce with, cannot scale as it sums; NCCL can.
            if isinstance(module, FSDPModule) and not self.task.is_on_gpu:
                module.set_force_sum_reduction_for_comms(True)
        if self.task.is_on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _run_train_optim_step(self, batches: Any, max_grad_norm: float | None = None) -> Any:
        sample = super()._run_train_optim_step(batches, max_grad_norm)
        self.losses.append(sample.metrics["loss"])
        self.task.after_step(len(self.losses))
        return sample

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing is saved."""


def recipe_settings(task: Task) -> dict[str, Any]:
    """AutoModel's settings for the task; what is not set has its default."""
    settings = task.settings
    optimizer = settings["optimizer"]
    layout = settings["layout"]
    recomputed = settings["activation_checkpoint"]["mode"]
    option = settings["activation_checkpoint"]["selective_ac_option"]
    if recomputed == "selective" and option != "op":
        recomputed = "none"  # it can keep most products only by keeping everything
    adapters = settings["lora"]
    peft = {}
    if adapters["rank"]:
        # Those of the layers, not the head.
        of_linear = {"target_modules": ["*_proj"], "use_triton": task.is_on_gpu}
        sizes = {"dim": adapters["rank"], "alpha": adapters["alpha"]}
        peft = {"peft": {"_target_": PeftConfig, **of_linear, **sizes}}

    def rows() -> Rows:
        return Rows(task.tokens)

    return peft | {
        "seed": settings["seed"],
        "dist_env": {"backend": "nccl" if task.is_on_gpu else "gloo", "timeout_minutes": 10},
        "model": {
            "_target_": NeMoAutoModelForCausalLM.from_config,
            "config": task.folder,
            "force_hf": True,
            "attn_implementation": "sdpa",
            # A frozen base is stored as it is computed with, as ours is.
            "torch_dtype": settings["compute" if peft else "dtype"],
        },
        "distributed": {
            "strategy": "fsdp2",
            "dp_replicate_size": layout["dp_replicate"],
            # Each layer with its adapters would be compiled by itself, which takes minutes.
            "enable_compile": settings["compiled"] and not peft,
            "patch_is_packed_sequence": True,
            "activation_checkpointing": {"none": False}.get(recomputed, recomputed),
            "mp_policy": {
                "_target_": MixedPrecisionPolicy,
                "param_dtype": settings["compute"],
                "reduce_dtype": "float32",
                "cast_forward_inputs": False,
            },
        },
        "loss_fn": {"_target_": ChunkedCrossEntropy, "compile": settings["compiled"]},
        "optimizer": {
            "_target_": torch.optim.AdamW,
            "lr": optimizer["lr"],
            "betas": [optimizer["beta1"], optimizer["beta2"]],
            "eps": optimizer["eps"],
            "weight_decay": optimizer["weight_decay"],
            "fused": optimizer["implementation"] == "fused",
        },
        "clip_grad_norm": {"max_norm": settings["max_norm"] or float("inf")},
        "dataset": {"_target_": rows, "tokenizer": None},
        "dataloader": {"batch_size": None, "pin_memory": task.is_on_gpu},
        "step_scheduler": {
            "global_batch_size": settings["sequences"],
            "local_batch_size": settings["batch_size"],
            "max_steps": settings["steps"],
            "num_epochs": 1,
            "ckpt_every_steps": 10**9,
            "save_checkpoint_every_epoch": False,
            "gc_every_steps": settings["gc_freq"],
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": task.folder},
    }


def described(settings: Any) -> Any:
    """Settings as JSON has them."""
    if isinstance(settings, dict):
        return {name: described(one) for name, one in settings.items()}
    if isinstance(settings, list):
        return [described(one) for one in settings]
    return settings if isinstance(settings, int | float | str | None) else str(settings)


if __name__ == "__main__":
    main()

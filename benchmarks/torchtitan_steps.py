"""The steps that `lacuna bench --against torchtitan` left in a folder, made by its Trainer.

python benchmarks/torchtitan_steps.py FOLDER
(in several processes by torchrun; `lacuna bench` starts it by itself)

Model, optimizer, precision, recomputation, compilation and parallelism are torchtitan's own, with
the task's sizes and settings; the weights and the rows are the task's.
"""

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan_device  # noqa: F401  (before torchtitan's own parts)
from steps import Task, make_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.quantization.float8 import AUTO_FILTER_SMALL_KN_FLAG
from torchtitan.config import JobConfig
from torchtitan.models import llama3, qwen3
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer
from torchtitan_mixtures import mixture_sizes, take_stacks
from transformers import AutoConfig, PretrainedConfig

from lacuna.parallel.mesh import AXES
from lacuna.parallel.processes import stop_process

NAME = "lacuna_bench"
NEVER = 10**9


def main() -> None:
    # torchtitan wants the variables of torchrun in a single process as well.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}).items():
        os.environ.setdefault(name, value)
    init_logger()
    task = Task(sys.argv[1])
    register_train_spec(NAME, train_spec(task))
    trainer = StepsTrainer(task)
    trainer.train()
    losses = trainer.mean_losses()
    task.write(
        losses[0],
        losses=losses,
        precision=trainer.precision,
        float8_layers=trainer.float8_layers,
        arguments=trainer.job_config.to_dict(),
    )
    trainer.close()
    stop_process()


class Rows(BaseDataLoader):
    """The rows of this rank, as torchtitan wants them: with labels that are shifted already."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for batch in self.task.tokens:
            whole = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
            if not torch.equal(batch["position_ids"], whole):
                raise ValueError("torchtitan's attention sees whole rows: documents begin in them.")
            columns = (batch["input_ids"], batch["labels"])
            tokens, labels = (self._pinned(column) for column in columns)
            yield {"input": tokens}, labels

    def _pinned(self, column: Tensor) -> Tensor:
        return column.pin_memory() if self.task.is_on_gpu else column

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is resumed."""


class StepsTrainer(Trainer):
    """torchtitan's trainer with the weights of the task, and a clock."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.losses: list[Tensor] = []
        super().__init__(job_config(task))
        self.float8_layers = sum(
            type(module).__name__ == "Float8Linear" for module in self.model_parts[0].modules()
        )
        self.precision = self._precision()
        for module in self.model_parts[0].modules():
            # gloo, which tests reduce with, cannot scale as it sums; NCCL can.
            if isinstance(module, FSDPModule) and not task.is_on_gpu:
                module.set_force_sum_reduction_for_comms(True)
        self._load_weights()

    def _precision(self) -> str:
        """How torchtitan mixes precisions in this layout."""
        training = self.job_config.training
        computed = training.mixed_precision_param
        way = f"fully_shard casts parameters and the stream between layers to {computed}"
        if not self.parallel_dims.fsdp_enabled:
            way = f"autocast to {computed}; the stream between layers is in {training.dtype}"
        return f"parameters and optimizer in {training.dtype}; {way}"

    def _load_weights(self) -> None:
        """Gives the model the weights that lacuna's begins with."""
        weights = make_model(self.task).state_dict()
        stacks = take_stacks(weights)
        adapter = self.train_spec.state_dict_adapter(self.model_args, None)
        whole = StateDictOptions(full_state_dict=True, strict=True)
        state = adapter.from_hf(weights) | stacks
        set_model_state_dict(self.model_parts[0], state, options=whole)
        del weights, stacks, state
        gc.collect()
        if self.task.is_on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def forward_backward_step(self, **given: Any) -> Tensor:
        loss = super().forward_backward_step(**given)
        self.losses.append(loss.detach())
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.task.after_step(self.step)

    def mean_losses(self) -> list[float]:
        """The mean loss of a token in each step, over all ranks; all ranks must call it."""
        # Each is this rank's sum over the number of tokens of all ranks.
        losses = torch.stack(self.losses).view(-1, self.gradient_accumulation_steps).sum(1)
        dist.all_reduce(losses)
        values: list[float] = losses.tolist()
        return values


def train_spec(task: Task) -> TrainSpec:
    """torchtitan's own parts for the kind of model, with the task's sizes and rows."""
    config = AutoConfig.from_pretrained(task.folder)
    family: Any = llama3 if config.model_type == "llama" else qwen3
    spec: TrainSpec = family.get_train_spec()
    sizes = llama_sizes(config) if family is llama3 else qwen3_sizes(config)
    if config.model_type == "qwen3_moe":
        # Its kernel that sorts tokens for grouped products needs a GPU.
        grouped = task.is_on_gpu and task.settings["compute"] == "bfloat16"
        sizes = replace(sizes, **mixture_sizes(config, grouped))
    spec.model_args = {NAME: sizes}
    spec.build_dataloader_fn = lambda **_: Rows(task)
    spec.build_tokenizer_fn = None
    return spec


def llama_sizes(config: PretrainedConfig) -> llama3.TransformerModelArgs:
    rope = config.rope_parameters
    scaling = RoPEScalingArgs(scaling_factor=1.0)  # leaves frequencies as they are
    if rope["rope_type"] == "llama3":
        scaling = RoPEScalingArgs(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    return llama3.TransformerModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        # Its own width is rounded up to a multiple: to this one, from two thirds of it.
        multiple_of=config.intermediate_size,
        ffn_dim_multiplier=config.intermediate_size / (4 * config.hidden_size),
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling_args=scaling,
    )


def qwen3_sizes(config: PretrainedConfig) -> qwen3.Qwen3ModelArgs:
    return qwen3.Qwen3ModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        head_dim=config.head_dim,
        hidden_dim=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        enable_weight_tying=config.tie_word_embeddings,
    )


def job_config(task: Task) -> JobConfig:
    """torchtitan's settings for the task; what is not set has its default."""
    settings = task.settings
    config = JobConfig()
    config.job.dump_folder = task.folder
    config.model.name = NAME
    config.model.flavor = NAME
    config.metrics.log_freq = NEVER  # but for the first step; each report forgets the peaks
    config.metrics.disable_color_printing = True
    config.debug.seed = settings["seed"]
    config.debug.deterministic = settings["deterministic"]
    config.compile.enable = settings["compiled"]
    optimizer = settings["optimizer"]
    for name in ("name", "lr", "beta1", "beta2", "eps", "weight_decay", "implementation"):
        setattr(config.optimizer, name, optimizer[name])
    config.lr_scheduler.warmup_steps = 0
    config.lr_scheduler.decay_ratio = 0.0
    training = config.training
    training.local_batch_size = settings["batch_size"]
    training.global_batch_size = settings["sequences"]
    training.seq_len = settings["seq_len"]
    training.steps = settings["steps"]
    training.max_norm = settings["max_norm"] or NEVER
    training.dtype = settings["dtype"]
    training.mixed_precision_param = settings["compute"]
    training.gc_freq = settings["gc_freq"]
    for axis in ("dp_replicate", "dp_shard", "cp"):
        setattr(config.parallelism, AXES[axis], settings["layout"][axis])
    for name in ("expert_parallel_degree", "fsdp_reshard_after_forward"):
        setattr(config.parallelism, name, settings["parallelism"][name])
    recomputed = settings["activation_checkpoint"]
    config.activation_checkpoint.mode = recomputed["mode"]
    option = recomputed["selective_ac_option"]
    # It cannot keep all products; by operation is what comes next.
    config.activation_checkpoint.selective_ac_option = option if option.isdecimal() else "op"
    if settings["float8"]["enable_float8_linear"]:
        use_float8(config, settings["float8"])
    return config


def use_float8(config: JobConfig, settings: dict[str, Any]) -> None:
    """Has torchtitan compute in float8 the layers that lacuna does; changes `config` in place."""
    config.model.converters = ["quantize.linear.float8"]
    float8 = config.quantize.linear.float8
    float8.filter_fqns = ["output"]
    if settings["filter_small"]:
        float8.filter_fqns.append(AUTO_FILTER_SMALL_KN_FLAG)
    # Its way to tensorwise scales that can be sent is to name no recipe.
    is_tensorwise = settings["recipe_name"] in (None, "tensorwise")
    float8.recipe_name = None if is_tensorwise else settings["recipe_name"]
    for name in (
        "enable_fsdp_float8_all_gather",
        "precompute_float8_dynamic_scale_for_fsdp",
        "emulate",
    ):
        setattr(float8, name, settings[name])


if __name__ == "__main__":
    main()

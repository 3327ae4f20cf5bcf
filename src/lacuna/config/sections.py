"""The settings of how the model learns (job, model, training, optimizer), and all sections together."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from lacuna.config import machine
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import DataConfig, PackingConfig, ValidationConfig
from lacuna.config.fields import Path, Section, also
from lacuna.config.packaged import packaged


class JobConfig(Section):
    """What kind of run this is and where it writes."""

    task: Literal["pretrain", "sft", "distill", "preference", "grpo", "ppo"] = "pretrain"
    """What is trained for: pretrain on texts, or sft on conversations; the others are not available yet."""
    name: str = "quickstart"
    """Name of the run. Unset: the TOML file's name without .toml."""
    dump_folder: Path = Field(default_factory=lambda given: f"outputs/{given['name']}")
    """Folder that everything is written to. Unset: outputs/<name>."""
    description: str = ""
    """A note for the reader of config.toml; it changes nothing."""
    print_args: bool = False
    """Print every resolved setting at the start."""


class ModelConfig(Section):
    """Which model is trained."""

    name_or_path: Path | None = None
    """Hub id or folder of a Hugging Face model whose weights the run starts from."""
    config: Annotated[Path, AfterValidator(packaged)] | None = None
    """Hub id, folder or .json file (also one that ships with lacuna) of a configuration; the weights are
    initialised from scratch."""
    tokenizer_path: Path | None = None
    """Hub id or folder of the tokenizer. Unset: where the model or its configuration comes from."""
    attention: Literal[
        "auto", "sdpa", "eager", "varlen", "flex_attention", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    """How attention is computed; auto takes the fastest that is exact on this machine."""


class TrainingConfig(Section):
    """How long, on how much at once, and in which precision."""

    epochs: PositiveInt | None = None
    """Passes over the data, instead of training.steps."""
    steps: PositiveInt | None = Field(default_factory=lambda given: None if given["epochs"] else 10_000)
    """Optimizer steps. Unset: 10000, or as many as training.epochs takes."""
    batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and micro-batch; 1 with training.varlen."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per optimizer step. Unset: what training.global_batch_size takes, else 1."""
    global_batch_size: PositiveInt | None = None
    """Sequences per optimizer step over all ranks. Unset: batch size x accumulation x data-parallel ranks."""
    seq_len: PositiveInt = 2048
    """Tokens per sequence of the batch."""
    context_len: PositiveInt = Field(default_factory=lambda given: given["seq_len"])
    """Longest document in tokens with training.varlen; longer ones are cut into pieces. Unset: seq_len."""
    varlen: bool = False
    """Pack documents of any length into one row per rank, each attending to itself alone."""
    max_norm: NonNegativeFloat = 1.0
    """Gradient norm that larger gradients are clipped to; 0 means no clipping."""
    skip_nan_inf: bool = False
    """Skip an optimizer step whose gradient norm is not finite."""
    max_skipped_steps: PositiveInt = 10
    """Consecutive skipped steps after which the run stops."""
    seed: NonNegativeInt = 42
    """Seed that every random choice derives from."""
    deterministic: bool = False
    """Use deterministic kernels only, so that a GPU run repeats bit for bit; slower."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision that the parameters and the optimizer state are stored in."""
    mixed_precision_param: Literal["bfloat16", "float32"] | None = None
    """Precision of the computation. Unset: bfloat16 on a GPU, float32 on a CPU."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Precision that gradients are summed over ranks in."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory."""
    gc_freq: PositiveInt = 50
    """Steps between two collections of Python's garbage, at the same step on all ranks."""


class OptimizerConfig(Section):
    """What moves the weights."""

    name: Annotated[Literal["AdamW"], also(adamw="AdamW")] = "AdamW"
    """Optimizer; upper and lower case are the same."""
    lr: NonNegativeFloat = 8e-4
    """Learning rate at the end of the warmup."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Share of a weight taken away per step, times the learning rate."""
    implementation: Annotated[Literal["fused", "foreach", "for-loop"], also(true="fused", false="foreach")] = "fused"
    """How torch applies the update; fused is the fastest."""
    early_step_in_backward: bool = False
    """Update each parameter in the backward pass and drop its gradient at once; leaves nothing to clip or to skip."""


class LRSchedulerConfig(Section):
    """How the learning rate rises and falls."""

    warmup_steps: NonNegativeInt = 200
    """Steps over which the learning rate rises from near 0."""
    decay_type: Literal["linear", "sqrt", "cosine", "constant", "wsd"] = "linear"
    """Shape of the fall; constant means none, wsd is linear over the last tenth unless decay_ratio is given."""
    decay_ratio: float | None = Field(default_factory=lambda given: {"wsd": 0.1}.get(given["decay_type"]), ge=0, le=1)
    """Share of all steps over which it falls at the end. Unset: all steps after the warmup, a tenth with wsd."""
    lr_min: float = Field(0.0, ge=0, le=1)
    """Where the fall ends, as a ratio of optimizer.lr."""


class Config(Section):
    """Every setting of a run."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    chat: ChatConfig = ChatConfig()
    packing: PackingConfig = PackingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    parallelism: machine.ParallelismConfig = machine.ParallelismConfig()
    activation_checkpoint: machine.ActivationCheckpointConfig = machine.ActivationCheckpointConfig()
    compile: machine.CompileConfig = machine.CompileConfig()
    float8: machine.Float8Config = machine.Float8Config()
    checkpoint: machine.CheckpointConfig = machine.CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: machine.MetricsConfig = machine.MetricsConfig()
    profiling: machine.ProfilingConfig = machine.ProfilingConfig()
    comm: machine.CommConfig = machine.CommConfig()
    memory_estimation: machine.MemoryEstimationConfig = machine.MemoryEstimationConfig()

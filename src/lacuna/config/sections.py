"""The settings of how the model learns, and all sections of the settings together."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from lacuna.config import machine
from lacuna.config.adapters import LoraConfig, QuantizationConfig
from lacuna.config.documents import (
    ChatConfig,
    CurriculumConfig,
    DataConfig,
    PackingConfig,
    Stage,
    ValidationConfig,
)
from lacuna.config.fields import Names, Path, Section, also, packaged
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.task import known_task, trains_on


class JobConfig(Section):
    """What kind of run this is and where it writes."""

    task: Annotated[str, AfterValidator(known_task)] = "pretrain"
    """What is trained for: pretrain on texts, sft on conversations, preference on pairs of answers,
    distill from a larger model, or an objective of your own, as module:name."""

    name: str = "run"
    """Name of the run. Unset: that of job.dump_folder, else of the TOML file without .toml."""

    dump_folder: Path = Field(default_factory=lambda given: f"outputs/{given['name']}")
    """Folder that everything is written to. Unset: outputs/<name>."""

    description: str = ""
    """A note for the reader of config.toml; it changes nothing."""

    print_args: bool = False
    """Print every resolved setting at the start."""


class ModelConfig(Section):
    """Which model is trained."""

    name_or_path: Path | None = None
    """Hub id or folder of a Hugging Face model, or GGUF file, whose weights the run starts from."""

    config: Annotated[Path, AfterValidator(packaged)] | None = None
    """Hub id, folder or .json file (also one that ships with lacuna) of a configuration; the
    weights are initialised from scratch."""

    tokenizer_path: Path | None = None
    """Hub id or folder of the tokenizer. Unset: where the model or its configuration comes from."""

    new_tokens: Names = ()
    """Special tokens (of roles, reasoning, tools) that the tokenizer gets unless it has them. Each
    gets a row of the embedding and the head: the mean of the rows that were there."""

    vocabulary_multiple: PositiveInt = 1
    """The rows of embedding and head are padded to a multiple of this."""

    train_new_tokens_only: bool = False
    """Of the embedding and the head, train only the rows of model.new_tokens, and without weight
    decay (peft's trainable_token_indices); the rest of the model is trained as ever."""

    output_router_logits: bool | None = None
    """Train the load-balancing loss of a mixture of experts as well. Unset: as the model's
    configuration says."""

    router_aux_loss_coef: NonNegativeFloat | None = None
    """How much that loss counts. Unset: as the model's configuration says."""

    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer comes with; otherwise those that have some are
    refused."""

    attention: Literal[
        "auto",
        "sdpa",
        "eager",
        "varlen",
        "flex_attention",
        "flash_attention_2",
        "flash_attention_3",
    ] = "auto"
    """How attention is computed; auto takes the fastest that is exact on this machine, varlen is
    FlashAttention of the newest kind that is installed."""


class TrainingConfig(Section):
    """How long, on how much at once, and in which precision."""

    epochs: PositiveInt | None = None
    """Passes over the data, instead of training.steps."""

    steps: PositiveInt | None = Field(
        default_factory=lambda given: None if given["epochs"] else 10_000
    )
    """Optimizer steps. Unset: 10000, or as many as training.epochs takes."""

    batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and micro-batch; 1 with training.varlen."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per optimizer step. Unset: what training.global_batch_size takes, else 1."""

    global_batch_size: PositiveInt | None = None
    """Sequences per optimizer step over all ranks. Unset: batch size x accumulation x data-parallel
    ranks."""

    seq_len: PositiveInt = 2048
    """Tokens per sequence of the batch."""

    context_len: PositiveInt = Field(default_factory=lambda given: given["seq_len"])
    """Longest document in tokens with training.varlen; longer ones are cut into pieces. Unset:
    seq_len."""

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
    """Precision that the trained parameters and the optimizer state are stored in."""

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

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""

    weight_decay: NonNegativeFloat = 0.1
    """Share of a weight taken away per step, times the learning rate."""

    implementation: Annotated[
        Literal["fused", "foreach", "for-loop"], also(true="fused", false="foreach")
    ] = "fused"
    """How torch applies the update; fused is the fastest."""

    early_step_in_backward: bool = False
    """Update each parameter in the backward pass and drop its gradient at once; leaves nothing to
    clip or to skip."""


class LRSchedulerConfig(Section):
    """How the learning rate rises and falls."""

    warmup_steps: NonNegativeInt | None = None
    """Steps over which the learning rate rises from near 0. Unset: a tenth of the run, at most
    200."""

    decay_type: Literal["linear", "sqrt", "cosine", "constant", "wsd"] = "linear"
    """Shape of the fall; constant means none, wsd is linear over the last tenth unless decay_ratio
    is given."""

    decay_ratio: float | None = Field(
        default_factory=lambda given: {"wsd": 0.1}.get(given["decay_type"]), ge=0, le=1
    )
    """Share of all steps over which it falls at the end. Unset: all steps after the warmup, a tenth
    with wsd."""

    lr_min: float = Field(default=0.0, ge=0, le=1)
    """Where the fall ends, as a ratio of optimizer.lr."""


class Config(Section):
    """Every setting of a run."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    chat: ChatConfig = ChatConfig()
    packing: PackingConfig = PackingConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    lora: LoraConfig = LoraConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    preference: PreferenceConfig = PreferenceConfig()
    distillation: DistillationConfig = DistillationConfig()
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

    @property
    def trains_on(self) -> str:
        """What the data are: texts, conversations, or preferences."""
        return self.distillation.data if self.job.task == "distill" else trains_on(self.job.task)

    @property
    def conversations(self) -> ChatConfig | None:
        """How conversations become tokens; None where the task is to train on texts."""
        return None if self.trains_on == "texts" else self.chat

    def stages(self) -> "list[Config]":
        """The configuration before the first table of the curriculum, then that of each table.

        `training.global_batch_size` must be known, so that each stage keeps it.
        """
        configs = [self]
        for stage in self.curriculum.stages:
            configs.append(configs[-1]._changed_by(stage))
        return configs

    def _changed_by(self, stage: Stage) -> "Config":
        """This configuration with what the stage changes."""
        training = self.training
        changes: dict[str, Any] = stage.model_dump(
            include={"seq_len", "batch_size", "global_batch_size"}, exclude_none=True
        )
        changes["gradient_accumulation_steps"] = None
        # With the same seed it would draw the same data again.
        changes["seed"] = training.seed + 1
        if stage.seq_len and training.context_len == training.seq_len:
            changes["context_len"] = stage.seq_len
        elif stage.seq_len:
            changes["context_len"] = min(training.context_len, stage.seq_len)
        sources = self.data.resolved_sources()
        shares = stage.data_probs or [source.weight for source in sources]
        mixed = tuple(
            source.model_copy(update={"weight": share})
            for source, share in zip(sources, shares, strict=True)
        )
        return self.model_copy(
            update={
                "training": training.model_copy(update=changes),
                "data": self.data.model_copy(update={"sources": mixed}),
            }
        )

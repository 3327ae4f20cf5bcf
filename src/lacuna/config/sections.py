"""The settings of how the model learns, and all sections of the settings together."""

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from lacuna.config import machine
from lacuna.config.adapters import LoraConfig, QuantizationConfig
from lacuna.config.attentions import known_attention
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import (
    CurriculumConfig,
    CurriculumStage,
    DataConfig,
    PackingConfig,
    ValidationConfig,
)
from lacuna.config.fields import Names, Path, Section, packaged
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.optimizers import LRSchedulerConfig, OptimizerConfig
from lacuna.config.reinforcement import GrpoConfig, PpoConfig, RewardsConfig, RolloutConfig
from lacuna.config.row_form import RowForm
from lacuna.config.task import known_task, trains_on


class JobConfig(Section):
    """What kind of run this is and where it writes."""

    task: Annotated[str, AfterValidator(known_task)] = "pretrain"
    """What is trained for: pretrain on texts, sft on conversations, preference on pairs of answers,
    reward to score answers as pairs say, distill from a larger model, grpo or ppo on rewards of the
    model's own answers, or an objective of your own, as module:name."""

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
    gets a row of the embedding and the head, which begins as the mean of the other rows."""

    vocabulary_multiple: PositiveInt = 1
    """The rows of embedding and head are padded to a multiple of this."""

    train_new_tokens_only: bool = False
    """Of the embedding and the head, train only the rows of model.new_tokens, and without weight
    decay (peft's trainable_token_indices); the rest of the model is trained as usual."""

    output_router_logits: bool | None = None
    """Train the load-balancing loss of a mixture of experts as well. Unset: as the model's
    configuration says."""

    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the load-balancing loss. Unset: as the model's configuration says."""

    router_bias_update_rate: NonNegativeFloat = 0.0
    """How far each step moves the bias by which a router chooses each expert, so that all experts
    get as many tokens (DeepSeek-V3's loss-free balancing; its rate is 0.001). 0: not at all."""

    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer comes with. Otherwise models and tokenizers
    with code of their own are refused."""

    attention: Annotated[str, AfterValidator(known_attention)] = "auto"
    """How attention is computed: auto (the fastest that is exact on this machine), sdpa, eager,
    varlen (FlashAttention of the newest kind that is installed), flex_attention,
    flash_attention_2, flash_attention_3; or what it is in the place of softmax: softpick,
    rectified, scaled_softmax, scaled_softpick, softmax_plus_one, softmax_sinks, gated_softmax,
    head_gated_softmax, or an attention of your own, as module:name."""


class TrainingConfig(Section):
    """How long, on how much at once, and in which precision."""

    epochs: PositiveInt | None = None
    """Passes over the data, instead of training.steps."""

    steps: PositiveInt | None = Field(
        default_factory=lambda given: None if given["epochs"] else 10_000
    )
    """Optimizer steps. Unset: 10000, or as many as training.epochs takes."""

    batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and micro-batch; must be set to 1 with training.varlen."""

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
    """Precision in which gradients are summed over ranks."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory."""

    gc_freq: PositiveInt = 50
    """Steps between two collections of Python's garbage, at the same step on all ranks."""


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
    grpo: GrpoConfig = GrpoConfig()
    ppo: PpoConfig = PpoConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    parallelism: machine.ParallelismConfig = machine.ParallelismConfig()
    critic_parallelism: machine.CriticParallelismConfig = machine.CriticParallelismConfig()
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
        """What the data are: texts, conversations, preferences, or prompts."""
        return self.distillation.data if self.job.task == "distill" else trains_on(self.job.task)

    @property
    def conversations(self) -> ChatConfig | None:
        """How conversations become tokens; None where the task is to train on texts.

        Prompts may be texts, for which a tokenizer needs no template: it is None unless one is set.
        """
        may_be_texts = self.trains_on == "prompts" and self.chat.template is None
        return None if self.trains_on == "texts" or may_be_texts else self.chat

    @property
    def records_steps(self) -> bool:
        """Whether steps may be CUDA graphs, if the model, the layout and the device are for it."""
        moving = (
            self.activation_checkpoint.offload,
            self.optimizer.early_step_in_backward,
            self.optimizer.state_offload_share,
        )
        suits = self.job.task in ("pretrain", "sft") and not any(moving)
        return suits and self.compile.cuda_graphs is not False

    @property
    def may_halve_weights(self) -> bool:
        """Whether weights may be kept in halves (`SplitWeights`), if the device is for it."""
        others = (
            *(self.lora.rank, self.model.train_new_tokens_only, self.float8.enable_float8_linear),
            self.activation_checkpoint.mlp_chunks > 1,  # each uses the weights
        )
        return self.training.dtype == "float32" and self.optimizer.is_plain and not any(others)

    @property
    def gives_scores(self) -> bool:
        """Whether the model gives scores to sequences, and no text."""
        return self.job.task == "reward"

    @property
    def judged_answers(self) -> PreferenceConfig | None:
        """How judged answers are learnt; None where the task trains on something else."""
        return self.preference if self.trains_on == "preferences" else None

    @property
    def row_form(self) -> RowForm:
        """What the rows of a batch are like: texts lie end to end, all others are kept whole."""
        mode = self.packing.mode
        if mode == "auto":
            mode = "concatenate" if self.trains_on == "texts" else "best_fit"
        sharing = (
            self.parallelism.tensor_parallel_degree,
            self.parallelism.context_parallel_degree,
            self.parallelism.pipeline_parallel_degree,
        )
        return RowForm(
            length=self.training.seq_len,
            longest_piece=self.training.context_len,
            trains_on=self.trains_on,
            judged_by=self.preference.loss,
            packing=self.packing.model_copy(update={"mode": mode}),
            document_mask=self.data.document_mask,
            predict_across_documents=self.data.predict_across_documents,
            is_shared=max(sharing) > 1,
        )

    @property
    def longest_piece(self) -> int:
        """The most tokens that see each other in any stage of the curriculum."""
        return max(stage.training.context_len for stage in self.curriculum_stages())

    def curriculum_stages(self) -> "list[Config]":
        """The configuration before the first table of the curriculum, then that of each table.

        `training.global_batch_size` must be known, so that each stage keeps it.
        """
        configs = [self]
        for stage in self.curriculum.stages:
            configs.append(configs[-1]._changed_by(stage))
        return configs

    def _changed_by(self, stage: CurriculumStage) -> "Config":
        """This configuration with what the stage changes."""
        training = self.training
        changes: dict[str, Any] = stage.model_dump(
            include={"seq_len", "batch_size", "global_batch_size"}, exclude_none=True
        )
        changes["gradient_accumulation_steps"] = None
        # With the same seed the stage would draw the same data again.
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


# The name of every section -> its class.
SECTIONS: dict[str, type[Section]] = {
    name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()
}

"""The settings of how the model learns (job, model, training, optimizer), and all sections together."""

import json
import pathlib
import re
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    model_validator,
)
from safetensors import SafetensorError, safe_open

from lacuna.config import machine
from lacuna.config.documents import (
    ChatConfig,
    CurriculumConfig,
    DataConfig,
    PackingConfig,
    ValidationConfig,
)
from lacuna.config.errors import explained, refuse
from lacuna.config.fields import Names, Path, Paths, Section, also, packaged, read_value
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.task import known_task, trains_on


class JobConfig(Section):
    """What kind of run this is and where it writes.

    task: What is trained for: pretrain on texts, sft on conversations, preference on pairs of
        answers, distill from a larger model, or an objective of your own, as module:name.
    name: Name of the run. Unset: that of job.dump_folder, else of the TOML file without .toml.
    dump_folder: Folder that everything is written to. Unset: outputs/<name>.
    description: A note for the reader of config.toml; it changes nothing.
    print_args: Print every resolved setting at the start.
    """

    task: Annotated[str, AfterValidator(known_task)] = "pretrain"
    name: str = "run"
    dump_folder: Path = Field(default_factory=lambda given: f"outputs/{given['name']}")
    description: str = ""
    print_args: bool = False


class ModelConfig(Section):
    """Which model is trained.

    name_or_path: Hub id or folder of a Hugging Face model, or GGUF file, whose weights the run
        starts from.
    config: Hub id, folder or .json file (also one that ships with lacuna) of a configuration; the
        weights are initialised from scratch.
    tokenizer_path: Hub id or folder of the tokenizer. Unset: where the model or its configuration
        comes from.
    new_tokens: Special tokens (of roles, reasoning, tools) that the tokenizer gets unless it has
        them. Each gets a row of the embedding and the head: the mean of the rows that were there.
    vocabulary_multiple: The rows of embedding and head are padded to a multiple of this.
    train_new_tokens_only: Of the embedding and the head, train only the rows of model.new_tokens,
        and without weight decay (peft's trainable_token_indices); the rest of the model is trained
        as ever.
    output_router_logits: Train the load-balancing loss of a mixture of experts as well. Unset: as
        the model's configuration says.
    router_aux_loss_coef: How much that loss counts. Unset: as the model's configuration says.
    trust_remote_code: Run the Python code that a model or tokenizer comes with; otherwise those
        that have some are refused.
    attention: How attention is computed; auto takes the fastest that is exact on this machine,
        varlen is FlashAttention of the newest kind that is installed.
    """

    name_or_path: Path | None = None
    config: Annotated[Path, AfterValidator(packaged)] | None = None
    tokenizer_path: Path | None = None
    new_tokens: Names = ()
    vocabulary_multiple: PositiveInt = 1
    train_new_tokens_only: bool = False
    output_router_logits: bool | None = None
    router_aux_loss_coef: NonNegativeFloat | None = None
    trust_remote_code: bool = False
    attention: Literal[
        "auto",
        "sdpa",
        "eager",
        "varlen",
        "flex_attention",
        "flash_attention_2",
        "flash_attention_3",
    ] = "auto"


class TrainingConfig(Section):
    """How long, on how much at once, and in which precision.

    epochs: Passes over the data, instead of training.steps.
    steps: Optimizer steps. Unset: 10000, or as many as training.epochs takes.
    batch_size: Sequences per data-parallel rank and micro-batch; 1 with training.varlen.
    gradient_accumulation_steps: Micro-batches per optimizer step. Unset: what
        training.global_batch_size takes, else 1.
    global_batch_size: Sequences per optimizer step over all ranks. Unset: batch size x accumulation
        x data-parallel ranks.
    seq_len: Tokens per sequence of the batch.
    context_len: Longest document in tokens with training.varlen; longer ones are cut into pieces.
        Unset: seq_len.
    varlen: Pack documents of any length into one row per rank, each attending to itself alone.
    max_norm: Gradient norm that larger gradients are clipped to; 0 means no clipping.
    skip_nan_inf: Skip an optimizer step whose gradient norm is not finite.
    max_skipped_steps: Consecutive skipped steps after which the run stops.
    seed: Seed that every random choice derives from.
    deterministic: Use deterministic kernels only, so that a GPU run repeats bit for bit; slower.
    dtype: Precision that the trained parameters and the optimizer state are stored in.
    mixed_precision_param: Precision of the computation. Unset: bfloat16 on a GPU, float32 on a CPU.
    mixed_precision_reduce: Precision that gradients are summed over ranks in.
    enable_cpu_offload: Keep parameters, gradients and optimizer state in CPU memory.
    gc_freq: Steps between two collections of Python's garbage, at the same step on all ranks.
    """

    epochs: PositiveInt | None = None
    steps: PositiveInt | None = Field(
        default_factory=lambda given: None if given["epochs"] else 10_000
    )
    batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None
    seq_len: PositiveInt = 2048
    context_len: PositiveInt = Field(default_factory=lambda given: given["seq_len"])
    varlen: bool = False
    max_norm: NonNegativeFloat = 1.0
    skip_nan_inf: bool = False
    max_skipped_steps: PositiveInt = 10
    seed: NonNegativeInt = 42
    deterministic: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    mixed_precision_param: Literal["bfloat16", "float32"] | None = None
    mixed_precision_reduce: Literal["float32"] = "float32"
    enable_cpu_offload: bool = False
    gc_freq: PositiveInt = 50


# peft's files of an adapter, and its names of our settings.
ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FIELDS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules",
    "parameters": "target_parameters",
    "modules": "modules_to_save",
    "rslora": "use_rslora",
    "dora": "use_dora",
}


# What makes an adapter of peft's something else, when it is not empty, and ways to begin that
# change the base itself.
_UNKNOWN = ("alpha_pattern", "rank_pattern", "lora_bias", "alora_invocation_tokens")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
# By which it also says for which layers it is, beside a regular expression and all-linear.
_CHOICES = {"exclude_modules", "layers_to_transform"}


def described_adapter(folder: str) -> dict[str, Any]:
    """What peft's description says of the LoRA adapter in a folder. Raises UserError where that is none, or unknown."""
    file, mend = pathlib.Path(folder, ADAPTER_FILE), "give the folder of an adapter"
    with explained(
        f"lora.adapter: cannot read {file}", OSError, ValueError, SafetensorError, mend=mend
    ):
        stated = {
            name: one for name, one in dict(json.loads(file.read_text())).items() if one is not None
        }
        chosen = stated.get("target_modules", ())
        named = stated.get("target_parameters", ())
        layers = [name.removesuffix(".weight") for name in named if name.endswith(".weight")]
        if layers and not isinstance(chosen, str):  # peft's way out where it mistakes their names
            chosen = stated["target_modules"] = [*chosen, *layers]
            stated["target_parameters"] = [name for name in named if not name.endswith(".weight")]
        if stated.keys() & _CHOICES or isinstance(chosen, str):
            keys = safe_open(file.with_name(ADAPTER_WEIGHTS), framework="pt").keys()
            stated["target_modules"] = re.findall(
                r"base_model\.model\.(\S+)\.lora_A\.weight", " ".join(keys)
            )
    start = str(stated.get("init_lora_weights")).partition("_")[0]
    changes = f"began by {start}, which changes the base: save it with peft's path_initial_model_for_weight_conversion"
    reasons = {
        f"has {name}, which lacuna does not know": bool(stated.get(name)) for name in _UNKNOWN
    }
    reasons |= {
        "is of no LoRA adapter": stated.get("peft_type") != "LORA",
        changes: start in _CHANGES_BASE,
    }
    refuse({f"lora.adapter: {file} {reason}": applies for reason, applies in reasons.items()})
    return stated


class LoraConfig(Section):
    """Adapters (LoRA): the model stays as it is, and small matrices beside its layers learn.

    adapter: Folder of an adapter, peft's or a run's hf/adapter, that training starts from; the
        settings below are by default its own. Of several, which must be for the same layers, the
        sum: one of their ranks together.
    rank: Width of the adapters; 0 trains the model itself.
    alpha: The adapters' part of a layer's output is multiplied by alpha / rank.
    dropout: Share of the inputs that adapters are not shown.
    targets: Linear layers that get one: names or patterns; all-linear is all but the head and gates
        of one output.
    parameters: Stacks of weights, as of experts, that get one: names or patterns of parameters
        (peft's target_parameters).
    modules: Modules that are trained whole beside the adapters, by name or pattern (peft's
        modules_to_save).
    rslora: Multiply by alpha / sqrt(rank) instead.
    dora: Learn the lengths of the rows of weights apart from their directions (DoRA).
    init: What new adapters begin as: zero changes nothing; loftq is the low-rank part of what
        quantization.base took from the weights beside them (LoftQ), which learns best at a somewhat
        lower rate.
    """

    adapter: Paths = ()
    rank: NonNegativeInt = 0
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Names = ("all-linear",)
    parameters: Names = ()
    modules: Names = ()
    rslora: bool = False
    dora: bool = False
    init: Literal["zero", "loftq"] = "zero"

    @model_validator(mode="before")
    @classmethod
    def _as_described(cls, given: Any) -> Any:
        """The settings given, and for the others those of the adapters that training starts from."""
        if (
            not isinstance(given, dict)
            or not given.get("adapter")
            or given.keys() >= ADAPTER_FIELDS.keys()
        ):
            return given
        folders = TypeAdapter(Paths).validate_python(given["adapter"])
        stated = [{"target_modules": ()} | described_adapter(folder) for folder in folders]
        for one, (ours, name) in product(stated, ADAPTER_FIELDS.items()):
            wrong = f"lora.adapter: its description has {name} = {one.get(name)}, which is not what lora.{ours} takes"
            with explained(wrong, ValueError, mend="mend it there"):
                read_value(
                    cls.model_fields[ours], one.get(name, cls.model_fields[ours].get_default())
                )
        each = [
            {ours: one[name] for ours, name in ADAPTER_FIELDS.items() if name in one}
            for one in stated
        ]
        together = {"rank": sum(one["rank"] for one in each)} if len(each) > 1 else {}
        return each[0] | together | given


class QuantizationConfig(Section):
    """Fewer bits for weights that stay as they are (QLoRA).

    base: How the linear layers beside adapters are kept, all but the head: nf4 takes 4.13 bits a
        weight, int8 a little more than 8. On a GPU nf4 needs bitsandbytes. On a lone one, an
        embedding that is frozen and not also the head stays in CPU memory.
    """

    base: Literal["none", "int8", "nf4"] = "none"


class OptimizerConfig(Section):
    """What moves the weights.

    name: Optimizer; upper and lower case are the same.
    lr: Learning rate at the end of the warmup.
    beta1: Decay of the running mean of gradients.
    beta2: Decay of the running mean of squared gradients.
    eps: Added to the denominator.
    weight_decay: Share of a weight taken away per step, times the learning rate.
    implementation: How torch applies the update; fused is the fastest.
    early_step_in_backward: Update each parameter in the backward pass and drop its gradient at
        once; leaves nothing to clip or to skip.
    """

    name: Annotated[Literal["AdamW"], also(adamw="AdamW")] = "AdamW"
    lr: NonNegativeFloat = 8e-4
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: NonNegativeFloat = 0.1
    implementation: Annotated[
        Literal["fused", "foreach", "for-loop"], also(true="fused", false="foreach")
    ] = "fused"
    early_step_in_backward: bool = False


class LRSchedulerConfig(Section):
    """How the learning rate rises and falls.

    warmup_steps: Steps over which the learning rate rises from near 0. Unset: a tenth of the run,
        at most 200.
    decay_type: Shape of the fall; constant means none, wsd is linear over the last tenth unless
        decay_ratio is given.
    decay_ratio: Share of all steps over which it falls at the end. Unset: all steps after the
        warmup, a tenth with wsd.
    lr_min: Where the fall ends, as a ratio of optimizer.lr.
    """

    warmup_steps: NonNegativeInt | None = None
    decay_type: Literal["linear", "sqrt", "cosine", "constant", "wsd"] = "linear"
    decay_ratio: float | None = Field(
        default_factory=lambda given: {"wsd": 0.1}.get(given["decay_type"]), ge=0, le=1
    )
    lr_min: float = Field(0.0, ge=0, le=1)


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
        """The configuration of each stage of the curriculum, beginning with that before the first of its tables.

        The number of sequences of a step must be known there, for it to stay.
        """
        found = [self]
        for stage in self.curriculum.stages:
            config = found[-1]
            before, sources = config.training, config.data.resolved_sources()
            changes = stage.model_dump(
                include={"seq_len", "batch_size", "global_batch_size"}, exclude_none=True
            )
            if stage.seq_len:
                whole = before.context_len == before.seq_len
                changes["context_len"] = (
                    stage.seq_len if whole else min(before.context_len, stage.seq_len)
                )
            changes |= {
                "gradient_accumulation_steps": None,
                "seed": before.seed + 1,
            }  # or it would draw the same again
            training = before.model_copy(update=changes)
            shares = stage.data_probs or [source.weight for source in sources]
            mixed = (
                one.model_copy(update={"weight": share})
                for one, share in zip(sources, shares, strict=True)
            )
            data = config.data.model_copy(update={"sources": tuple(mixed)})
            found.append(config.model_copy(update={"training": training, "data": data}))
        return found

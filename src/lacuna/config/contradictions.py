"""Settings that do not go together, or that cannot be had at all: which, when, and why."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lacuna.config.adapters import LoraConfig
from lacuna.config.documents import READERS
from lacuna.config.fields import Section
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.sections import Config
from lacuna.config.task import TASKS

Predicate = Callable[[Config], object]


@dataclass(frozen=True)
class Rule:
    """Settings that are refused where `applies` is true, or neither empty nor 0; and the reason."""

    settings: tuple[str, ...]
    applies: Predicate
    reason: str


def contradictions_of(config: Config) -> Iterator[str]:
    """A message for each rule that applies to the configuration."""
    for rule in RULES:
        if rule.applies(config):
            yield f"{', '.join(rule.settings)}: {rule.reason}"


def _given(setting: str, beside: Predicate = lambda _: True) -> Predicate:
    """Whether a setting is given (not false, empty or 0) where another condition holds as well."""
    section, name = setting.split(".")
    return lambda config: getattr(getattr(config, section), name) and beside(config)


def _each(settings: tuple[str, ...], other: str, applies: Predicate, reason: str) -> list[Rule]:
    """For each of the settings a rule: it is refused beside the other one, where it is given."""
    return [Rule((setting, other), _given(setting, applies), reason) for setting in settings]


_NEED_CACHE = ("training.epochs", "curriculum.difficulty_column", "curriculum.rank_every")
_NO_CACHE = "needs the cache; drop either"
_NEED_LOSS = ("checkpoint.keep_best", "validation.patience")
_NEED_DATASET = tuple(
    f"validation.{name}" for name in ("enable", "dataset_name", "data_dir", "data_files")
)
_NEED_ADAPTER = ("lora.dropout", "lora.parameters", "lora.modules", "lora.dora", "lora.rslora")
_UNAVAILABLE = {
    "parallelism.enable_compiled_autograd": (
        "torch's compiled autograd gives wrong gradients under FSDP2; leave it out"
    ),
    "memory_estimation.disable_fake_mode": (
        "the estimate is computed from shapes, nothing is faked; leave it out"
    ),
    "float8.enable_float8_linear": "float8 is not available yet; leave it out",
    "float8.enable_fsdp_float8_all_gather": "float8 is not available yet; leave it out",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "float8 is not available yet; leave it out",
    "float8.recipe_name": "float8 is not available yet; leave it out",
}


def _only_for(task: str, section: str, kind: type[Section]) -> list[Rule]:
    """For each setting of a section a rule: it is refused where another task of ours is trained for."""
    return [
        Rule(
            (f"{section}.{name}", "job.task"),
            _differs(section, name, lambda config: config.job.task in {*TASKS} - {task}),
            f"only {task} takes the first; set the second to it, or drop the first",
        )
        for name in kind.model_fields
    ]


def _differs(section: str, name: str, beside: Predicate) -> Predicate:
    """Whether a setting is not as it is by default, where another condition holds as well."""

    def differs(config: Config) -> object:
        table = getattr(config, section)
        return getattr(table, name) != getattr(type(table)(), name) and beside(config)

    return differs


RULES: tuple[Rule, ...] = (
    Rule(
        ("model.name_or_path", "model.config"),
        lambda config: config.model.name_or_path and config.model.config,
        "both are given; keep one (--model.config none takes the file's away)",
    ),
    Rule(
        ("model.name_or_path", "model.config"),
        lambda config: not config.model.name_or_path and not config.model.config,
        "give the first to start from its weights, or the second from scratch",
    ),
    Rule(
        ("training.steps", "training.epochs"),
        lambda config: config.training.steps and config.training.epochs,
        "both are given; keep one (--training.steps none takes the file's away)",
    ),
    *_each(_NEED_CACHE, "data.streaming", _given("data.streaming"), _NO_CACHE),
    *_each(
        _NEED_CACHE,
        "data.tokenization",
        lambda config: config.data.tokenization == "online",
        _NO_CACHE,
    ),
    Rule(
        ("training.batch_size", "training.varlen"),
        lambda config: config.training.batch_size != 1 and config.training.varlen,
        "the first must be 1; raise training.seq_len instead",
    ),
    Rule(
        ("training.varlen", "data.document_mask"),
        lambda config: config.training.varlen and not config.data.document_mask,
        "varlen masks documents; drop varlen, or keep the mask",
    ),
    Rule(
        ("data.dataset", "data.sources"),
        lambda config: config.data.dataset and config.data.sources,
        "two spellings of the same; keep one",
    ),
    Rule(
        ("data.data_files", "data.dataset", "data.sources"),
        lambda config: (
            config.data.data_files and not config.data.dataset and not config.data.sources
        ),
        f"set the second to the files' reader: {', '.join(READERS)}",
    ),
    Rule(
        ("data.streaming", "data.tokenization"),
        lambda config: config.data.streaming and config.data.tokenization == "cache",
        "a stream cannot be cached; keep one of them",
    ),
    *_each(
        _NEED_LOSS,
        "validation.dataset",
        lambda config: not config.validation.dataset,
        "needs the validation loss; set the second",
    ),
    *_each(
        _NEED_LOSS,
        "validation.enable",
        lambda config: config.validation.enable is False,
        "needs the validation; drop the second",
    ),
    *_each(
        _NEED_DATASET,
        "validation.dataset",
        lambda config: not config.validation.dataset,
        "set the second, or drop it",
    ),
    Rule(
        ("curriculum.stages", "training.epochs"),
        lambda config: config.curriculum.stages and config.training.epochs,
        "stages draw their data anew; drop either",
    ),
    Rule(
        ("curriculum.stages", "curriculum.rank_every"),
        lambda config: config.curriculum.stages and config.curriculum.rank_every,
        "stages draw their data anew; drop either",
    ),
    Rule(
        ("curriculum.difficulty_column", "curriculum.rank_every"),
        lambda config: config.curriculum.difficulty_column and config.curriculum.rank_every,
        "two orders of the same; keep one",
    ),
    *_each(
        ("checkpoint.keep_best", "checkpoint.create_seed_checkpoint"),
        "checkpoint.enable_checkpoint",
        lambda config: not config.checkpoint.enable_checkpoint,
        "needs the second",
    ),
    Rule(
        ("model.train_new_tokens_only", "model.new_tokens"),
        lambda config: config.model.train_new_tokens_only and not config.model.new_tokens,
        "the second names the rows that the first trains; set it",
    ),
    *_each(
        ("model.train_new_tokens_only",),
        "optimizer.early_step_in_backward",
        lambda config: config.optimizer.early_step_in_backward,
        "early steps train all rows; drop one",
    ),
    *_each(
        _NEED_ADAPTER,
        "lora.rank",
        lambda config: not config.lora.rank,
        "without the second there is no adapter; set it",
    ),
    Rule(
        ("lora.alpha", "lora.rank"),
        lambda config: config.lora.alpha != LoraConfig().alpha and not config.lora.rank,
        "without it there is no adapter; set it",
    ),
    Rule(
        ("lora.targets", "lora.rank"),
        lambda config: config.lora.targets != LoraConfig().targets and not config.lora.rank,
        "without it there is no adapter; set it",
    ),
    Rule(
        ("lora.parameters", "lora.dropout"),
        lambda config: config.lora.parameters and config.lora.dropout,
        "what dropout and DoRA do to layers cannot be done to stacks; drop one of them",
    ),
    Rule(
        ("lora.parameters", "lora.dora"),
        lambda config: config.lora.parameters and config.lora.dora,
        "what dropout and DoRA do to layers cannot be done to stacks; drop one of them",
    ),
    Rule(
        ("job.task", "distillation.teacher"),
        lambda config: config.job.task == "distill" and not config.distillation.teacher,
        "there is nobody to learn from; set the second",
    ),
    *_only_for("distill", "distillation", DistillationConfig),
    *_only_for("preference", "preference", PreferenceConfig),
    Rule(
        ("distillation.beta", "distillation.divergence"),
        _differs("distillation", "beta", lambda config: config.distillation.divergence != "jsd"),
        "only jsd has a mixture; set the second to it, or drop the first",
    ),
    Rule(
        ("preference.margin", "preference.loss"),
        _differs("preference", "margin", lambda config: config.preference.loss != "simpo"),
        "only simpo has a margin; set the second to it, or drop the first",
    ),
    *(
        Rule(
            (f"preference.{name}", "preference.loss"),
            _differs("preference", name, lambda config: config.preference.loss != "kto"),
            "only kto weighs its answers; set the second to it, or drop the first",
        )
        for name in ("desirable_weight", "undesirable_weight")
    ),
    Rule(
        ("distillation.teacher_base", "parallelism.tensor_parallel_degree"),
        lambda config: (
            config.distillation.teacher_base != "none"
            and config.parallelism.tensor_parallel_degree != 1
        ),
        "packed weights do not split; keep one",
    ),
    Rule(
        ("preference.label_smoothing", "preference.loss"),
        lambda config: (
            config.preference.label_smoothing and config.preference.loss not in ("sigmoid", "simpo")
        ),
        "only sigmoid and simpo smooth labels; drop the first",
    ),
    Rule(
        ("preference.reference", "data.streaming"),
        lambda config: config.preference.reference == "cached" and config.data.streaming,
        "a stream has no pass before training; use copy, or drop the second",
    ),
    Rule(
        ("quantization.base", "lora.rank"),
        lambda config: config.quantization.base != "none" and not config.lora.rank,
        "quantised weights only learn through adapters; set the second",
    ),
    Rule(
        ("quantization.base", "lora.dora"),
        lambda config: config.quantization.base != "none" and config.lora.dora,
        "DoRA measures weights, which are packed; drop one of them",
    ),
    Rule(
        ("quantization.base", "parallelism.tensor_parallel_degree"),
        lambda config: (
            config.quantization.base != "none" and config.parallelism.tensor_parallel_degree != 1
        ),
        "packed weights do not split; keep one",
    ),
    Rule(
        ("lora.init", "quantization.base"),
        lambda config: config.lora.init == "loftq" and config.quantization.base == "none",
        "needs what quantising took from weights; set the second",
    ),
    Rule(
        ("lora.init", "model.name_or_path"),
        lambda config: config.lora.init == "loftq" and not config.model.name_or_path,
        "only for new adapters on a loaded model; drop it",
    ),
    Rule(
        ("lora.init", "lora.adapter"),
        lambda config: config.lora.init == "loftq" and config.lora.adapter,
        "only for new adapters on a loaded model; drop it",
    ),
    Rule(
        ("optimizer.early_step_in_backward", "training.max_norm"),
        lambda config: config.optimizer.early_step_in_backward and config.training.max_norm,
        "early steps leave nothing to clip; set max_norm = 0",
    ),
    Rule(
        ("optimizer.early_step_in_backward", "training.skip_nan_inf"),
        lambda config: config.optimizer.early_step_in_backward and config.training.skip_nan_inf,
        "an early step cannot be skipped; drop one",
    ),
    Rule(
        ("activation_checkpoint.mode", "compile.enable"),
        lambda config: (
            config.activation_checkpoint.mode == "memory_budget" and config.compile.enable is False
        ),
        "needs torch.compile; drop the second",
    ),
    *_each(
        ("activation_checkpoint.offload",),
        "activation_checkpoint.mode",
        lambda config: config.activation_checkpoint.mode != "full",
        "full leaves what is moved; set that mode",
    ),
    Rule(
        ("parallelism.zero_stage", "parallelism.fsdp_reshard_after_forward"),
        lambda config: (
            (config.parallelism.zero_stage, config.parallelism.fsdp_reshard_after_forward)
            in {(1, "always"), (2, "always"), (3, "never")}
        ),
        "they are opposites; keep one",
    ),
    Rule(
        ("parallelism.expert_parallel_degree",),
        lambda config: config.parallelism.expert_parallel_degree != 1,
        "expert parallelism is not available yet; leave it out",
    ),
    Rule(
        ("parallelism.data_parallel_shard_degree",),
        lambda config: config.parallelism.data_parallel_shard_degree == 0,
        "must be a number of ranks, or -1 for all that remain",
    ),
    Rule(
        ("checkpoint.keep_latest_k",),
        lambda config: config.checkpoint.keep_latest_k == 1,
        "the only complete checkpoint would be deleted during a save; use 2 or more",
    ),
    *_each(
        ("checkpoint.hf_upload_enabled",),
        "checkpoint.hf_repo_base_name",
        lambda config: not config.checkpoint.hf_repo_base_name,
        "the second says where to, as organisation/name",
    ),
    *_each(
        ("checkpoint.hf_repo_base_name",),
        "checkpoint.hf_upload_enabled",
        lambda config: not config.checkpoint.hf_upload_enabled,
        "nothing would be sent there; set the second",
    ),
    Rule(
        ("validation.steps",),
        lambda config: config.validation.steps == 0,
        "must be a number of batches, or -1 for all",
    ),
    Rule(
        ("float8.scaling_type_input",),
        lambda config: config.float8.scaling_type_input == "delayed",
        "torchao removed delayed scaling; use dynamic",
    ),
    Rule(
        ("float8.scaling_type_weight",),
        lambda config: config.float8.scaling_type_weight == "delayed",
        "torchao removed delayed scaling; use dynamic",
    ),
    Rule(
        ("float8.scaling_type_grad_output",),
        lambda config: config.float8.scaling_type_grad_output == "delayed",
        "torchao removed delayed scaling; use dynamic",
    ),
    *(Rule((setting,), _given(setting), reason) for setting, reason in _UNAVAILABLE.items()),
)

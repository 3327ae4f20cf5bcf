"""Settings that do not go together, or that cannot be had at all: which, when, and why."""

from collections.abc import Iterator

from lacuna.config.attentions import is_own
from lacuna.config.documents import READERS
from lacuna.config.expert_rules import EXPERT_RULES
from lacuna.config.folder_rules import FOLDER_RULES
from lacuna.config.optimizer_rules import OPTIMIZER_RULES
from lacuna.config.pass_rules import PASS_RULES
from lacuna.config.precision_rules import PRECISION_RULES
from lacuna.config.rules import Rule, is_changed, is_given, rule_for_each
from lacuna.config.sections import Config
from lacuna.config.task_rules import STORED, TASK_RULES


def contradictions_of(config: Config) -> Iterator[str]:
    """A message for each rule that applies to the configuration."""
    for rule in RULES:
        if rule.applies(config):
            yield f"{', '.join(rule.settings)}: {rule.reason}"


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
    *(
        Rule((setting, way), is_given(setting, has_no_cache), "needs the cache; drop either")
        for way, has_no_cache in (
            ("data.streaming", is_given("data.streaming")),
            ("data.tokenization", lambda config: config.data.tokenization == "online"),
        )
        for setting in (
            *("training.epochs", "curriculum.difficulty_column", "curriculum.rank_every"),
            STORED,
        )
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
        ("data.text_column", "job.task"),
        is_given("data.text_column", lambda config: config.trains_on != "texts"),
        "only texts are in one column; name those of this task by chat.columns",
    ),
    Rule(
        ("packing.long_examples", "packing.mode"),
        is_changed(
            "packing.long_examples",
            lambda config: config.row_form.packing.mode == "concatenate",
        ),
        "texts that lie end to end are cut where rows end, however long they are; set the second "
        "to best_fit or none, or drop the first",
    ),
    Rule(
        ("data.streaming", "data.tokenization"),
        lambda config: config.data.streaming and config.data.tokenization == "cache",
        "a stream cannot be cached; keep one of them",
    ),
    *rule_for_each(
        ("checkpoint.keep_best", "validation.patience"),
        "validation.dataset",
        lambda config: not config.validation.dataset,
        "needs the validation loss; set the second",
    ),
    *rule_for_each(
        ("checkpoint.keep_best", "validation.patience"),
        "validation.enable",
        lambda config: config.validation.enable is False,
        "needs the validation; drop the second",
    ),
    *rule_for_each(
        tuple(
            f"validation.{name}" for name in ("enable", "dataset_name", "data_dir", "data_files")
        ),
        "validation.dataset",
        lambda config: not config.validation.dataset,
        "set the second, or drop the first",
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
    *rule_for_each(
        ("checkpoint.keep_best", "checkpoint.create_seed_checkpoint"),
        "checkpoint.enable_checkpoint",
        lambda config: not config.checkpoint.enable_checkpoint,
        "needs the second",
    ),
    Rule(
        ("checkpoint.load_step", "checkpoint.enable_checkpoint"),
        lambda config: config.checkpoint.load_step >= 0 and not config.checkpoint.enable_checkpoint,
        "needs the second",
    ),
    Rule(
        ("model.train_new_tokens_only", "model.new_tokens"),
        lambda config: config.model.train_new_tokens_only and not config.model.new_tokens,
        "the second names the rows that the first trains; set it",
    ),
    Rule(
        ("model.train_new_tokens_only", "optimizer.early_step_in_backward"),
        lambda config: (
            config.model.train_new_tokens_only and config.optimizer.early_step_in_backward
        ),
        "early steps train all rows; drop one",
    ),
    Rule(
        ("model.train_new_tokens_only", "optimizer.groups"),
        lambda config: (
            config.model.train_new_tokens_only
            and any(group.weight_decay for group in config.optimizer.groups)
        ),
        "its weight_decay would change the rows that do not learn; leave it out of the tables",
    ),
    *(
        Rule(
            (f"lora.{name}", "lora.rank"),
            is_changed(f"lora.{name}", lambda config: not config.lora.rank),
            "without the second there is no adapter; set it",
        )
        for name in ("alpha", "dropout", "targets", "parameters", "modules", "rslora", "dora")
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
    *TASK_RULES,
    Rule(
        ("lora.init", "quantization.base"),
        lambda config: config.lora.init == "loftq" and config.quantization.base == "none",
        "needs what quantising took from weights; set the second",
    ),
    Rule(
        ("lora.init", "lora.parameters"),
        lambda config: config.lora.init == "loftq" and config.lora.parameters,
        "what quantising took from stacks is not given to their adapters; drop one of them",
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
    *OPTIMIZER_RULES,
    *PASS_RULES,
    Rule(
        ("parallelism.zero_stage", "parallelism.fsdp_reshard_after_forward"),
        lambda config: (
            (config.parallelism.zero_stage, config.parallelism.fsdp_reshard_after_forward)
            in {(1, "always"), (2, "always"), (3, "never")}
        ),
        "they are opposites; keep one",
    ),
    *EXPERT_RULES,
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
    Rule(
        ("checkpoint.hf_upload_enabled", "checkpoint.hf_repo_base_name"),
        lambda config: (
            config.checkpoint.hf_upload_enabled and not config.checkpoint.hf_repo_base_name
        ),
        "the second says where to, as organisation/name",
    ),
    *(
        Rule(
            (f"checkpoint.{name}", "checkpoint.hf_upload_enabled"),
            is_changed(
                f"checkpoint.{name}", lambda config: not config.checkpoint.hf_upload_enabled
            ),
            "nothing would be sent; set the second",
        )
        for name in (
            "hf_repo_base_name",
            "hf_upload_when",
            "hf_upload_format",
            "hf_upload_background",
        )
    ),
    Rule(
        ("validation.steps",),
        lambda config: config.validation.steps == 0,
        "must be a number of batches, or -1 for all",
    ),
    Rule(
        ("model.attention", "lora.rank"),
        lambda config: config.lora.rank > 0 and is_own(config.model.attention),
        "the files of adapters cannot say the first, and would be opened with their base's "
        "attention; train all weights, or begin with a model that has this attention and leave the "
        "first out",
    ),
    *PRECISION_RULES,
    *FOLDER_RULES,
    Rule(
        ("metrics.attention", "validation.dataset"),
        is_given("metrics.attention", lambda config: not config.validation.resolved_source()),
        "held-out rows are read; set the second, and not validation.enable = false",
    ),
    Rule(
        ("metrics.attention", "job.task"),
        is_given(
            "metrics.attention",
            lambda config: config.gives_scores or config.trains_on == "prompts",
        ),
        "not for models that score, nor where held-out rows are prompts; drop the first",
    ),
    *(
        Rule(
            ("metrics.attention", f"parallelism.{degree}_parallel_degree"),
            is_changed(f"parallelism.{degree}_parallel_degree", is_given("metrics.attention")),
            "no rank sees a whole row of attention; use lacuna inspect on checkpoints instead",
        )
        for degree in ("tensor", "context", "pipeline")
    ),
    Rule(
        ("parallelism.enable_compiled_autograd",),
        is_given("parallelism.enable_compiled_autograd"),
        "torch's compiled autograd gives wrong gradients under FSDP2; leave it out",
    ),
    Rule(
        ("memory_estimation.disable_fake_mode",),
        is_given("memory_estimation.disable_fake_mode"),
        "the estimate is computed from shapes, nothing is faked; leave it out",
    ),
)

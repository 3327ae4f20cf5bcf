"""flame's documented flags and commands are accepted, or refused with a reason."""

import shlex

import pytest

from lacuna.commands.arguments import parse_run
from lacuna.config import Config, UserError, load_config, to_toml
from runs import environment, lacuna, write_model

BASE = '[model]\nconfig = "org/model"\n[data]\ndataset = "org/data"\n'

# flag and words -> canonical setting and value
ACCEPTED = [
    ("--job.dump_folder exp/run", "job.dump_folder", "exp/run"),
    ("--job.description hello", "job.description", "hello"),
    ("--job.print_args", "job.print_args", True),
    ("--model.config org/other", "model.config", "org/other"),
    ("--model.tokenizer_path org/tokenizer", "model.tokenizer_path", "org/tokenizer"),
    ("--profiling.enable_profiling", "profiling.enable_profiling", True),
    ("--profiling.save_traces_folder traces", "profiling.save_traces_folder", "traces"),
    ("--profiling.profile_freq 512", "profiling.profile_freq", 512),
    ("--profiling.enable_memory_snapshot", "profiling.enable_memory_snapshot", True),
    ("--profiling.save_memory_snapshot_folder mem", "profiling.save_memory_snapshot_folder", "mem"),
    ("--optimizer.name adamw", "optimizer.name", "AdamW"),
    ("--optimizer.eps 1e-15", "optimizer.eps", 1e-15),
    ("--optimizer.fused", "optimizer.implementation", "fused"),
    ("--optimizer.fused false", "optimizer.implementation", "foreach"),
    ("--optimizer.scheduler cosine", "lr_scheduler.decay_type", "cosine"),
    ("--optimizer.scheduler linear", "lr_scheduler.decay_type", "linear"),
    ("--optimizer.scheduler wsd", "lr_scheduler.decay_ratio", 0.1),
    ("--optimizer.lr 3e-4", "optimizer.lr", 3e-4),
    ("--optimizer.min_lr_ratio 0.1", "lr_scheduler.lr_min", 0.1),
    ("--training.batch_size 16", "training.batch_size", 16),
    ("--training.seq_len 4096", "training.seq_len", 4096),
    ("--training.context_len 2048", "training.context_len", 2048),
    ("--training.varlen --training.batch_size 1", "training.varlen", True),
    ("--training.warmup_steps 7", "lr_scheduler.warmup_steps", 7),
    ("--training.gradient_accumulation_steps 4", "training.gradient_accumulation_steps", 4),
    ("--training.steps 20", "training.steps", 20),
    ("--training.max_norm 0", "training.max_norm", 0.0),
    ("--training.skip_nan_inf", "training.skip_nan_inf", True),
    ("--training.dataset org/one", "data.dataset", ("org/one",)),
    ("--training.dataset_name sample-100BT", "data.dataset_name", ("sample-100BT",)),
    ("--training.dataset_split test", "data.dataset_split", ("test",)),
    ("--training.data_dir part", "data.data_dir", ("part",)),
    ("--training.data_files a.parquet,b.parquet", "data.data_files", ("a.parquet", "b.parquet")),
    ("--training.dataset a/b,c/d --training.data_probs 0.25,0.75", "data.data_probs", (0.25, 0.75)),
    ("--training.streaming", "data.streaming", True),
    ("--training.num_workers 32", "data.num_workers", 32),
    ("--training.prefetch_factor 4", "data.prefetch_factor", 4),
    (
        "--training.data_parallel_replicate_degree 2",
        "parallelism.data_parallel_replicate_degree",
        2,
    ),
    ("--training.data_parallel_shard_degree -1", "parallelism.data_parallel_shard_degree", -1),
    ("--training.tensor_parallel_degree 1", "parallelism.tensor_parallel_degree", 1),
    ("--training.mixed_precision_param bfloat16", "training.mixed_precision_param", "bfloat16"),
    ("--training.mixed_precision_reduce float32", "training.mixed_precision_reduce", "float32"),
    ("--training.compile", "compile.enable", True),
    ("--training.gc_freq 10", "training.gc_freq", 10),
    ("--training.seed 79", "training.seed", 79),
    ("--training.deterministic", "training.deterministic", True),
    ("--metrics.log_freq 5", "metrics.log_freq", 5),
    ("--metrics.enable_tensorboard", "metrics.enable_tensorboard", True),
    ("--metrics.disable_color_printing", "metrics.disable_color_printing", True),
    ("--metrics.save_tb_folder board", "metrics.save_tb_folder", "board"),
    ("--metrics.rank_0_only", "metrics.rank_0_only", True),
    ("--metrics.enable_wandb", "metrics.enable_wandb", True),
    ("--experimental.pipeline_parallel_degree 1", "parallelism.pipeline_parallel_degree", 1),
    (
        "--experimental.pipeline_parallel_schedule 1F1B",
        "parallelism.pipeline_parallel_schedule",
        "1F1B",
    ),
    ("--experimental.context_parallel_degree 1", "parallelism.context_parallel_degree", 1),
    (
        "--experimental.context_parallel_rotate_method allgather",
        "parallelism.context_parallel_rotate_method",
        "allgather",
    ),
    ("--training.tensor_parallel_degree 2", "parallelism.tensor_parallel_degree", 2),
    ("--training.disable_loss_parallel", "parallelism.disable_loss_parallel", True),
    ("--training.enable_cpu_offload", "training.enable_cpu_offload", True),
    (
        "--optimizer.early_step_in_backward --training.max_norm 0",
        "optimizer.early_step_in_backward",
        True,
    ),
    ("--experimental.pipeline_parallel_degree 2", "parallelism.pipeline_parallel_degree", 2),
    (
        "--experimental.pipeline_parallel_split_points layers.1,layers.2",
        "parallelism.pipeline_parallel_split_points",
        ("layers.1", "layers.2"),
    ),
    (
        "--experimental.pipeline_parallel_split_points layers.1 layers.2",
        "parallelism.pipeline_parallel_split_points",
        ("layers.1", "layers.2"),
    ),
    (
        "--experimental.pipeline_parallel_schedule Interleaved1F1B",
        "parallelism.pipeline_parallel_schedule",
        "Interleaved1F1B",
    ),
    (
        "--experimental.pipeline_parallel_microbatches 4",
        "parallelism.pipeline_parallel_microbatches",
        4,
    ),
    ("--experimental.context_parallel_degree 2", "parallelism.context_parallel_degree", 2),
    (
        "--experimental.context_parallel_rotate_method alltoall",
        "parallelism.context_parallel_rotate_method",
        "alltoall",
    ),
    ("--checkpoint.enable_checkpoint", "checkpoint.enable_checkpoint", True),
    ("--checkpoint.folder saved", "checkpoint.folder", "saved"),
    ("--checkpoint.interval_type step", "checkpoint.interval_type", "steps"),
    ("--checkpoint.interval_type seconds", "checkpoint.interval_type", "seconds"),
    ("--checkpoint.interval 2048", "checkpoint.interval", 2048),
    ("--checkpoint.model_weights_only", "checkpoint.model_weights_only", True),
    ("--checkpoint.export_dtype float16", "checkpoint.export_dtype", "float16"),
    ("--checkpoint.create_seed_checkpoint", "checkpoint.create_seed_checkpoint", True),
    (
        "--checkpoint.async_mode async_with_pinned_mem",
        "checkpoint.async_mode",
        "async_with_pinned_mem",
    ),
    ("--checkpoint.keep_latest_k 2", "checkpoint.keep_latest_k", 2),
    ("--checkpoint.load_step -1", "checkpoint.load_step", -1),
    ("--float8.enable_float8_linear", "float8.enable_float8_linear", True),
    ("--float8.scaling_type_input dynamic", "float8.scaling_type_input", "dynamic"),
    ("--float8.scaling_type_weight dynamic", "float8.scaling_type_weight", "dynamic"),
    ("--float8.scaling_type_grad_output dynamic", "float8.scaling_type_grad_output", "dynamic"),
    ("--comm.init_timeout_seconds 600", "comm.init_timeout_seconds", 600),
    ("--comm.train_timeout_seconds 300", "comm.train_timeout_seconds", 300),
    ("--comm.trace_buf_size 0", "comm.trace_buf_size", 0),
    ("--memory_estimation.enabled", "memory_estimation.enabled", True),
    ("--lr_scheduler.warmup_steps 1024", "lr_scheduler.warmup_steps", 1024),
    ("--lr_scheduler.decay_ratio 0.2", "lr_scheduler.decay_ratio", 0.2),
    ("--lr_scheduler.decay_type cosine", "lr_scheduler.decay_type", "cosine"),
    ("--lr_scheduler.lr_min 0.1", "lr_scheduler.lr_min", 0.1),
]

# flag and words -> the reason that the message must hold
REFUSED = [
    ("--job.use_for_integration_test", "no test suite"),
    ("--model.norm_type rmsnorm", "Hugging Face configuration decides"),
    ("--experimental.enable_compiled_autograd", "wrong gradients under FSDP2"),
    ("--float8.enable_fsdp_float8_all_gather", "does nothing without the second"),
    ("--float8.precompute_float8_dynamic_scale_for_fsdp", "does nothing without the second"),
    ("--float8.scaling_type_input delayed", "torchao removed delayed scaling"),
    ("--float8.scaling_type_weight delayed", "torchao removed delayed scaling"),
    ("--float8.scaling_type_grad_output delayed", "torchao removed delayed scaling"),
    ("--memory_estimation.disable_fake_mode", "computed from shapes"),
    ("--checkpoint.keep_latest_k 1", "the only complete checkpoint would be deleted"),
    ("--checkpoint.hf_upload_enabled", "the second says where to"),
    ("--checkpoint.hf_repo_base_name org/name", "nothing would be sent"),
    ("--checkpoint.convert_to_hf_on_save", "always exported"),
]

FLA_TOML = """
[model]
config = "org/model"
tokenizer_path = "org/tokenizer"
[job]
dump_folder = "exp"
print_args = true
[training]
batch_size = 32
seq_len = 2048
context_len = 2048
gradient_accumulation_steps = 1
steps = 20480
skip_nan_inf = true
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
compile = false
dataset = "org/data"
dataset_name = "default"
num_workers = 32
varlen = false
[optimizer]
eps = 1e-15
[checkpoint]
interval_type = "steps"
model_weights_only = false
export_dtype = "float32"
[metrics]
enable_wandb = true
[experimental]
context_parallel_degree = 1
[activation_checkpoint]
mode = "none"
"""

README_COMMAND = """
  --job.config_file flame/models/fla.toml
  --job.dump_folder exp/transformer-340M-4K-10B/batch1.seqlen65536
  --model.config configs/transformer_340M.json --model.tokenizer_path fla-hub/transformer-1.3B-100B
  --optimizer.name AdamW --optimizer.eps 1e-15 --optimizer.lr 3e-4
  --lr_scheduler.warmup_steps 1024 --lr_scheduler.lr_min 0.1 --lr_scheduler.decay_type cosine
  --training.batch_size 1 --training.seq_len 65536 --training.context_len 4096 --training.varlen
  --training.gradient_accumulation_steps 1 --training.steps 20480 --training.max_norm 1.0
  --training.skip_nan_inf --training.dataset HuggingFaceFW/fineweb-edu
  --training.dataset_name sample-100BT --training.dataset_split train --training.streaming
  --training.num_workers 32 --training.prefetch_factor 2 --training.seed 42 --training.compile
  --checkpoint.interval 2048 --checkpoint.load_step -1 --checkpoint.keep_latest_k 2
  --metrics.log_freq 1
"""

PAPER_COMMAND = """
  --job.config_file flame/models/fla.toml   --job.dump_folder exp/softpick.340M.batch16.steps100000
  --model.config configs/softpick_transformer_340M.json
  --model.tokenizer_path fla-hub/transformer-1.3B-100B
  --optimizer.name AdamW --optimizer.eps 1e-15 --optimizer.lr 3e-4
  --lr_scheduler.warmup_steps 1000 --lr_scheduler.lr_min 0.1 --lr_scheduler.decay_type cosine
  --training.batch_size 16 --training.seq_len 4096 --training.context_len 4096
  --training.gradient_accumulation_steps 1 --training.steps 100000 --training.max_norm 1.0
  --training.skip_nan_inf --training.dataset ./sample-100BT --training.dataset_split train
  --training.num_workers 32 --training.prefetch_factor 2 --training.seed 79 --training.compile
  --checkpoint.interval 10000 --checkpoint.load_step -1 --metrics.log_freq 5
  --comm.init_timeout_seconds 600 --comm.train_timeout_seconds 300
"""
UPLOAD_FLAGS = '--checkpoint.hf_upload_enabled --checkpoint.hf_repo_base_name "org/softpick-340M"'


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flame/models").mkdir(parents=True)
    (tmp_path / "flame/models/fla.toml").write_text(FLA_TOML)
    (tmp_path / "sample-100BT").mkdir()
    (tmp_path / "configs").mkdir()
    for name in ("transformer_340M.json", "softpick_transformer_340M.json"):
        (tmp_path / "configs" / name).write_text("{}")
    (tmp_path / "base.toml").write_text(BASE)
    return str(tmp_path / "base.toml")


def of_command(words: str) -> Config:
    return parse_run("train", "", shlex.split(words), "--dry-run")[1]


def value_of(config, setting):
    section, field = setting.split(".")
    return getattr(getattr(config, section), field)


@pytest.mark.parametrize(("flags", "setting", "value"), ACCEPTED, ids=[row[0] for row in ACCEPTED])
def test_flag_of_flame_sets_the_canonical_setting(base, flags, setting, value):
    extra = (
        [] if "context_len" not in setting else ["--training.varlen", "--training.batch_size", "1"]
    )
    assert value_of(load_config(base, [*flags.split(), *extra]), setting) == value


def test_flags_alone_are_a_run_of_their_own(base):
    flags = README_COMMAND.replace("--job.config_file flame/models/fla.toml", "")
    config = of_command(flags)
    assert config.validation.resolved_source() is None and config.validation.prompts == ()
    assert config.optimizer.beta1 == 0.9 and config.checkpoint.keep_latest_k == 2
    assert of_command("--training.steps 7").job.name == "quickstart"


@pytest.mark.parametrize("command", [README_COMMAND, PAPER_COMMAND + UPLOAD_FLAGS])
def test_commands_need_no_file_of_flames(base, command, tmp_path):
    (tmp_path / "flame/models/fla.toml").unlink()
    config = of_command(command)
    assert config.lr_scheduler.decay_type == "cosine" and config.training.skip_nan_inf
    with pytest.raises(UserError, match="other/fla.toml"):
        of_command(command.replace("flame/models", "other"))


@pytest.mark.parametrize(("flags", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_flag_of_flame_that_cannot_work_is_refused_with_its_reason(base, flags, reason):
    with pytest.raises(UserError) as error:
        load_config(base, flags.split())
    assert reason in str(error.value)
    assert flags.split()[0].partition(".")[2] in str(error.value)


def test_readme_command_of_flame_means_the_same_here(base):
    config = of_command(README_COMMAND)
    assert config.training.varlen and config.training.context_len == 4096
    assert config.training.batch_size == 1 and config.training.seq_len == 65536
    assert config.data.dataset == ("HuggingFaceFW/fineweb-edu",) and config.data.streaming
    assert config.data.dataset_name == ("sample-100BT",)
    assert config.compile.enable is True and config.training.skip_nan_inf
    assert config.lr_scheduler.lr_min == 0.1 and config.lr_scheduler.decay_type == "cosine"
    assert config.job.name == "batch1.seqlen65536" and config.job.dump_folder.startswith(
        "exp/transformer-340M"
    )
    assert config.metrics.enable_wandb and config.checkpoint.export_dtype == "float32"


def test_paper_command_of_flame_means_the_same_here(base):
    config = of_command(PAPER_COMMAND)
    assert config.training.seed == 79 and config.training.batch_size == 16
    assert config.comm.init_timeout_seconds == 600 and config.comm.train_timeout_seconds == 300
    assert config.data.dataset == ("./sample-100BT",)


def test_paper_command_uploads_after_each_checkpoint(base):
    checkpoint = of_command(PAPER_COMMAND + UPLOAD_FLAGS).checkpoint
    assert checkpoint.hf_upload_enabled and checkpoint.hf_repo_base_name == "org/softpick-340M"
    assert checkpoint.hf_upload_when == "checkpoint" and checkpoint.hf_upload_format == "hf"


def test_config_file_as_flag_is_the_positional_file(base):
    assert of_command(f"--job.config-file {base}") == load_config(base, [])
    assert of_command(f"{base} --job.config_file={base} --training.seed 3") == load_config(
        base, ["--training.seed=3"]
    )
    with pytest.raises(UserError, match="different TOML files"):
        of_command(f"{base} --job.config_file other.toml")
    assert of_command(f"--job.config_file gone.toml --job.config_file {base}") == load_config(
        base, []
    )
    with pytest.raises(UserError, match="job.config_file.*expected one argument"):
        of_command("--job.config_file --training.seed 3")


def test_resolved_toml_of_a_flame_command_reads_back_equal(base, tmp_path):
    config = of_command(README_COMMAND)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(str(tmp_path / "config.toml"), []) == config


@pytest.mark.slow
def test_paper_command_runs_with_another_data_set_and_model_and_says_once_that_there_is_no_token(
    base, world, tmp_path
):
    command = PAPER_COMMAND.replace("./sample-100BT", f"{world}/train.jsonl")
    command = command.replace("fla-hub/transformer-1.3B-100B", f"{world}/model")
    command = command.replace("configs/softpick_transformer_340M.json", f"{tmp_path}/long")
    write_model(tmp_path / "long", max_position_embeddings=4096)
    smaller = (
        "--training.steps 2 --lr_scheduler.warmup_steps 1 --training.batch_size 1 "
        "--training.num_workers 0"
    )
    smaller += " --training.compile false --metrics.enable_wandb false"
    kept = {
        name: value
        for name, value in environment(HF_HOME=str(tmp_path)).items()
        if name != "HF_TOKEN"
    }
    words = shlex.split(f"{command} {UPLOAD_FLAGS} {smaller}")
    printed = lacuna("train", *words, env=kept, cwd=tmp_path, timeout=400)
    assert printed.count("there is no token of the Hugging Face Hub") == 1
    assert (tmp_path / "exp/softpick.340M.batch16.steps100000/hf/model.safetensors").exists()

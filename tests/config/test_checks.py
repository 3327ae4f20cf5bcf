"""Settings that contradict each other are refused before the run, with the names of both."""

import json

import pytest

from lacuna.config import UserError, load_config
from lacuna.config.contradictions import RULES
from lacuna.config.documents import DataConfig, Source, ValidationConfig
from lacuna.config.parse import FIELDS

BASE = '[model]\nconfig = "org/model"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(flags="", text='[data]\ndataset = "org/data"\n'):
    with open("run.toml", "w") as file:
        file.write(BASE + text)
    return load_config("run.toml", flags.split())


def error_of(flags="", **kwargs):
    with pytest.raises(UserError) as error:
        load(flags, **kwargs)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ("--model.name_or_path a/b", "model.name_or_path", "model.config"),
        ("--model.config none", "model.name_or_path", "model.config"),
        ("--training.steps 5 --training.epochs 1", "training.steps", "training.epochs"),
        ("--training.epochs 1 --data.streaming", "training.epochs", "data.streaming"),
        (
            "--activation_checkpoint.selective_ac_option op",
            "activation_checkpoint.selective_ac_option",
            "activation_checkpoint.mode",
        ),
        (
            "--activation_checkpoint.memory_budget 0.3",
            "activation_checkpoint.memory_budget",
            "activation_checkpoint.mode",
        ),
        ("--training.epochs 1 --data.tokenization online", "training.epochs", "data.tokenization"),
        (
            "--training.epochs 1 --data.dataset a/b,c/d --data.data_probs 1,1",
            "training.epochs",
            "data.data_probs",
        ),
        ("--chat.train_on last", "chat.train_on", "job.task"),
        ("--job.task sft --data.text_column a", "data.text_column", "chat.columns"),
        ("--packing.long_examples drop", "packing.long_examples", "packing.mode"),
        (
            "--training.max_skipped_steps 3",
            "training.max_skipped_steps",
            "training.skip_nan_inf",
        ),
        (
            "--lr_scheduler.lr_min 0.1 --lr_scheduler.decay_type constant",
            "lr_scheduler.lr_min",
            "lr_scheduler.decay_type",
        ),
        (
            "--lr_scheduler.decay_ratio 0.1 --lr_scheduler.decay_type constant",
            "lr_scheduler.decay_ratio",
            "lr_scheduler.decay_type",
        ),
        ("--validation.enable", "validation.enable", "validation.dataset"),
        (
            "--checkpoint.hf_upload_when end",
            "checkpoint.hf_upload_when",
            "checkpoint.hf_upload_enabled",
        ),
        (
            "--checkpoint.hf_upload_background false",
            "checkpoint.hf_upload_background",
            "checkpoint.hf_upload_enabled",
        ),
        ("--float8.filter_small false", "float8.filter_small", "float8.enable_float8_linear"),
        ("--chat.template chatml", "chat.template", "job.task"),
        ("--training.varlen", "training.varlen", "raise training.seq_len instead"),
        ("--training.context_len 64", "training.context_len", "training.varlen"),
        (
            "--training.context_len 4096 --training.varlen --training.batch_size 1",
            "context_len",
            "training.seq_len",
        ),
        (
            "--training.varlen --training.batch_size 1 --data.document_mask false",
            "training.varlen",
            "data.document_mask",
        ),
        ("--training.global_batch_size 12", "training.global_batch_size", "training.batch_size"),
        (
            "--training.global_batch_size 24 --training.gradient_accumulation_steps 2",
            "training.global_batch_size",
            "8 x 2",
        ),
        ("--model.train_new_tokens_only", "model.train_new_tokens_only", "model.new_tokens"),
        ("--curriculum.rank_every 5 --data.streaming", "curriculum.rank_every", "data.streaming"),
        (
            "--curriculum.difficulty_column level --data.tokenization online",
            "curriculum.difficulty_column",
            "data.tokenization",
        ),
        (
            "--curriculum.difficulty_column level --curriculum.rank_every 5",
            "curriculum.difficulty_column",
            "curriculum.rank_every",
        ),
        (
            "--model.train_new_tokens_only --model.new_tokens <a> "
            "--optimizer.early_step_in_backward",
            "model.train_new_tokens_only",
            "optimizer.early_step_in_backward",
        ),
        (
            "--optimizer.early_step_in_backward",
            "optimizer.early_step_in_backward",
            "training.max_norm",
        ),
        (
            "--optimizer.name muon --optimizer.early_step_in_backward --training.max_norm 0",
            "optimizer.early_step_in_backward",
            "optimizer.name",
        ),
        (
            "--optimizer.name muon --lora.rank 4 --lora.parameters experts.down_proj",
            "lora.parameters",
            "optimizer.name",
        ),
        ("--optimizer.ns_steps 3", "optimizer.ns_steps", "optimizer.name"),
        (
            "--validation.prompts The --activation_checkpoint.mlp_chunks 2 "
            "--parallelism.tensor_parallel_degree 2",
            "activation_checkpoint.mlp_chunks",
            "validation.prompts",
        ),
        ("--optimizer.neuron_beta2 0.95", "optimizer.neuron_beta2", "optimizer.name"),
        ("--optimizer.nesterov false", "optimizer.nesterov", "optimizer.name"),
        ("--data.dataset a/b,c/d", "data.dataset", "data.data_probs"),
        (
            "--data.dataset a/b,c/d --data.data_probs 1",
            "data.data_probs",
            "each of the 2 datasets needs a share",
        ),
        (
            "--data.dataset a/b,c/d --data.data_probs 1,2,3",
            "data.data_probs",
            "each of the 2 datasets needs a share",
        ),
        (
            "--data.dataset a/b,c/d --data.dataset_name x,y,z",
            "data.dataset_name",
            "has 3 values for 2 datasets",
        ),
        ("--data.dataset_split train,test", "data.dataset_split", "has 2 values for 1 datasets"),
        ("--data.data_dir a,b", "data.data_dir", "has 2 values for 1 datasets"),
        (
            "--data.dataset a/b,c/d,e/f --data.data_files x,y",
            "data.data_files",
            "has 2 values for 3 datasets",
        ),
        (
            "--data.dataset a/b,c/d --data.data_probs 1,-1",
            "data.data_probs[1]",
            "greater than or equal to 0",
        ),
        ("--data.dataset a/b,c/d --data.data_probs 0,0", "data.data_probs", "not all 0"),
        ("--data.dataset none", "data.dataset", "data.sources"),
        ("--data.dataset ,", "data.dataset", "one of the 2 names is empty"),
        ("--data.dataset a/b,", "data.dataset", "one of the 2 names is empty"),
        ("--validation.dataset=", "validation.dataset", "should be a path"),
        ("--job.dump_folder=", "job.dump_folder", "should be a path"),
        ("--data.dataset none --data.data_files a.jsonl", "data.data_files", "data.dataset"),
        ("--data.streaming --data.tokenization cache", "data.streaming", "data.tokenization"),
        ("--checkpoint.keep_best", "checkpoint.keep_best", "validation.dataset"),
        ("--validation.patience 2", "validation.patience", "validation.dataset"),
        ("--validation.enable", "validation.enable", "validation.dataset"),
        ("--validation.data_dir x", "validation.data_dir", "validation.dataset"),
        (
            "--validation.dataset a/b --validation.enable false --validation.patience 2",
            "validation.patience",
            "validation.enable: needs the validation; drop the second",
        ),
        (
            "--checkpoint.enable_checkpoint false --checkpoint.create_seed_checkpoint",
            "checkpoint.enable_checkpoint",
            "checkpoint.create_seed_checkpoint",
        ),
        (
            "--checkpoint.enable_checkpoint false --checkpoint.load_step 8",
            "checkpoint.enable_checkpoint",
            "checkpoint.load_step",
        ),
        ("--checkpoint.folder hf", "checkpoint.folder", "hf, which the model replaces"),
        ("--metrics.save_tb_folder ./hf/tb", "metrics.save_tb_folder", "hf, which the model"),
        ("--profiling.save_traces_folder=.", "profiling.save_traces_folder", "the run folder"),
        (
            "--metrics.save_tb_folder checkpoint/",
            "checkpoint.folder, metrics.save_tb_folder",
            "each needs a folder of its own",
        ),
        (
            "--parallelism.zero_stage 2 --parallelism.fsdp_reshard_after_forward always",
            "parallelism.zero_stage",
            "parallelism.fsdp_reshard_after_forward",
        ),
        (
            "--parallelism.data_parallel_shard_degree 0",
            "parallelism.data_parallel_shard_degree",
            "-1 for all",
        ),
        ("--validation.steps 0", "validation.steps", "-1 for all"),
        (
            "--training.warmup_steps 11 --training.steps 10",
            "lr_scheduler.warmup_steps",
            "more than the 10 steps",
        ),
        (
            "--job.task rlhf",
            "job.task",
            "there is no such task, but pretrain, sft, distill, preference, grpo, reward, ppo",
        ),
        (
            "--activation_checkpoint.mode memory_budget --compile.enable false",
            "activation_checkpoint.mode",
            "compile.enable",
        ),
        ("--float8.recipe_name rowwise", "float8.recipe_name", "float8.enable_float8_linear"),
        (
            "--float8.enable_float8_linear --float8.enable_fsdp_float8_all_gather "
            "--float8.recipe_name rowwise",
            "float8.enable_fsdp_float8_all_gather",
            "float8.recipe_name",
        ),
        (
            "--float8.enable_float8_linear --float8.precompute_float8_dynamic_scale_for_fsdp",
            "float8.precompute_float8_dynamic_scale_for_fsdp",
            "float8.enable_fsdp_float8_all_gather",
        ),
        (
            "--float8.enable_float8_linear --parallelism.tensor_parallel_degree 2",
            "float8.enable_float8_linear",
            "parallelism.tensor_parallel_degree",
        ),
        (
            "--float8.enable_float8_linear --quantization.base nf4 --lora.rank 4",
            "float8.enable_float8_linear",
            "quantization.base",
        ),
        (
            "--parallelism.expert_parallel_degree 2 --activation_checkpoint.mlp_chunks 2",
            "expert_parallel_degree",
            "activation_checkpoint.mlp_chunks",
        ),
    ],
)
def test_contradiction_names_both_settings(flags, first, second):
    message = error_of(flags)
    assert first in message and second in message


@pytest.mark.parametrize(
    "flags",
    [
        "--training.varlen --training.batch_size 1 --training.context_len 64",
        "--training.global_batch_size 32",
        "--training.epochs 2 --data.dataset a/b,c/d",
        "--lr_scheduler.warmup_steps 10 --training.steps 10",
        "--lr_scheduler.warmup_steps 100 --training.epochs 1",
        "--validation.dataset a/b --validation.patience 2 --checkpoint.keep_best",
        "--parallelism.zero_stage 3 --parallelism.fsdp_reshard_after_forward always",
        "--data.dataset none --memory_estimation.enabled",
    ],
)
def test_settings_that_agree_are_accepted(flags):
    load(flags)


def test_rules_name_settings_that_there_are():
    assert {setting for rule in RULES for setting in rule.settings} <= set(FIELDS)


def test_two_spellings_of_sources_exclude_each_other():
    text = '[data]\ndataset = "a/b"\n[[data.sources]]\ndataset = "c/d"\n'
    assert "data.dataset, data.sources" in error_of(text=text)


def test_sources_need_all_weights_or_whole_passes():
    one, two = (
        '[[data.sources]]\ndataset = "a/b"\n',
        '[[data.sources]]\ndataset = "c/d"\nweight = 2\n',
    )
    assert "weight" in error_of(text=one + two)
    assert "weight" in error_of(text=one + one)
    load("--training.epochs 1", text=one + one)
    assert "training.epochs" in error_of("--training.epochs 1", text=two + two)
    assert [source.weight for source in load(text=two + two).data.resolved_sources()] == [2.0, 2.0]


def test_both_spellings_resolve_to_the_same_sources():
    lists = DataConfig(
        dataset="a,b", dataset_name="x,", dataset_split="train", data_files="f,g", data_probs="1,3"
    )
    tables = DataConfig(
        sources=[
            {"dataset": "a", "name": "x", "files": ["f"], "weight": 1},
            {"dataset": "b", "files": "g", "weight": 3},
        ]
    )
    assert lists.resolved_sources() == tables.resolved_sources()


def test_one_of_several_datasets_takes_several_files():
    data = DataConfig(dataset="json,csv", data_files=["a.jsonl,b.jsonl", "c.csv"], data_probs="1,1")
    assert [source.files for source in data.resolved_sources()] == [
        ("a.jsonl", "b.jsonl"),
        ("c.csv",),
    ]


def test_one_dataset_takes_all_files_and_needs_no_weight():
    data = DataConfig(dataset="json", data_files=["a.jsonl", "b.jsonl"])
    assert data.resolved_sources() == (Source(dataset="json", files=("a.jsonl", "b.jsonl")),)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("seq_len = 9", "table 1: does not say when it begins; give from_step or from_loss"),
        (
            "from_step = 3",
            "table 1: changes nothing; give data_probs, seq_len, batch_size or global_batch_size",
        ),
        (
            "from_step = 3\nseq_len = 9\n[[curriculum.stages]]\nfrom_step = 3\nseq_len = 8",
            "table 2: from_step = 3 is not after the 3 of the stage before",
        ),
        (
            "from_loss = 2.5\nseq_len = 9",
            "table 1: from_loss needs the validation loss; set validation.dataset",
        ),
        (
            "from_step = 3\ndata_probs = [1, 2]",
            "table 1: data_probs needs a share for each of the 1 sources",
        ),
        ("from_step = 3\ndata_probs = [0]", "and not all 0"),
        ("from_steps = 3\nseq_len = 9", "did you mean from_step?"),
    ],
)
def test_a_stage_that_cannot_be_meant_is_refused(table, message):
    assert message in error_of(
        text=f'[data]\ndataset = "org/data"\n[[curriculum.stages]]\n{table}\n'
    )


def test_stages_change_what_they_name_and_keep_the_rest():
    tables = (
        "[[curriculum.stages]]\nfrom_step = 2\nseq_len = 64\n"
        "[[curriculum.stages]]\nfrom_step = 4\nbatch_size = 2"
    )
    first, second, third = load(text='[data]\ndataset = "org/data"\n' + tables).curriculum_stages()
    lengths = [
        (config.training.seq_len, config.training.context_len) for config in (first, second, third)
    ]
    assert lengths == [(2048, 2048), (64, 64), (64, 64)]
    assert [config.training.batch_size for config in (first, second, third)] == [8, 8, 2]


def test_a_dataset_may_have_no_share_for_now():
    data = DataConfig(dataset="a,b", data_probs=(0.0, 1.0))
    assert [(source.dataset, source.weight) for source in data.resolved_sources()] == [
        ("a", 0.0),
        ("b", 1.0),
    ]


def test_validation_runs_when_a_source_is_given():
    assert ValidationConfig().resolved_source() is None
    assert ValidationConfig(dataset="a/b", enable=False).resolved_source() is None
    assert ValidationConfig(dataset="a/b").resolved_source() == Source(
        dataset="a/b", split="validation"
    )


def test_missing_local_files_are_named_with_the_nearest(folder):
    (folder / "configs").mkdir()
    (folder / "configs/llama_tiny.json").write_text("{}")
    (folder / "train.jsonl").write_text("")
    assert "did you mean llama_tiny.json?" in error_of("--model.config configs/lama_tiny.json")
    assert "there is no folder absent" in error_of("--model.config absent/tiny.json")
    message = error_of("--data.dataset json --data.data_files train.jsonl,tran.jsonl")
    assert (
        message == f"data.data_files: {folder}/tran.jsonl does not exist; did you mean train.jsonl?"
    )
    assert "data.dataset: /nowhere/data" in error_of("--data.dataset /nowhere/data")
    assert "did you mean train.jsonl?" in error_of("--data.dataset trains.jsonl")
    assert "validation.data_files" in error_of(
        "--validation.dataset json --validation.data_files gone.jsonl"
    )
    assert "checkpoint.initial_load_path" in error_of("--checkpoint.initial_load_path runs/step-5")
    assert "model.tokenizer_path" in error_of("--model.tokenizer_path ./tokenizer")
    source = '[[data.sources]]\ndataset = "json"\nfiles = ["gone.jsonl"]\n'
    assert "data.sources: " in error_of(text=source)


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("", "--model.name_or_path"),
        ("", "--model.config"),
        ("", "--model.tokenizer_path"),
        ("--job.task grpo", "--rewards.functions"),
        ("--job.task ppo --rewards.functions exact", "--ppo.critic"),
        ("--job.task distill", "--distillation.teacher"),
    ],
)
def test_a_model_that_can_only_be_a_folder_and_is_absent_is_told_of(folder, task, setting):
    (folder / "outputs/sft").mkdir(parents=True)
    for name in ("outputs/sft/hf", "./sft", f"{folder}/outputs/sft/hf/"):
        assert f"{setting[2:]}: {name} does not exist; " in error_of(f"{task} {setting} {name}")


def test_files_that_may_be_elsewhere_are_left_to_the_reader(folder):
    (folder / "corpus").mkdir()
    (folder / "corpus/a.jsonl").write_text("")
    load("--data.dataset json --data.data_files *.jsonl,https://example.org/a.jsonl")
    load("--data.dataset org/data --data.data_files en/part.json.gz")
    load("--data.dataset corpus --data.data_files a.jsonl")
    load("--data.dataset json --data.data_dir corpus --data.data_files a.jsonl")
    assert "b.jsonl does not exist" in error_of("--data.dataset corpus --data.data_files b.jsonl")


def test_adapters_are_by_default_those_that_training_starts_from(folder):
    described = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "modules_to_save": None,
        "use_dora": True,
    }
    described["peft_type"] = "LORA"
    (folder / "adapter_config.json").write_text(json.dumps(described))
    lora = load(f"--lora.adapter {folder} --lora.alpha 2").lora
    assert (lora.rank, lora.alpha, lora.targets, lora.modules, lora.dora) == (
        4,
        2.0,
        ("q_proj",),
        (),
        True,
    )
    wrong = {
        "peft_type = IA3": "is of no LoRA adapter",
        "init_lora_weights = pissa_niter_4": "began by pissa, which changes the base",
        "init_lora_weights = olora": "began by olora, which changes the base",
        "alora_invocation_tokens = 7": "has alora_invocation_tokens, which lacuna does not know",
    }
    for setting, said in wrong.items():
        (folder / "adapter_config.json").write_text(
            json.dumps(described | dict([setting.split(" = ")]))
        )
        assert f"lora.adapter: {folder}/adapter_config.json {said}" in error_of(
            f"--lora.adapter {folder}"
        )
    (folder / "adapter_config.json").write_text(json.dumps(described | {"lora_alpha": 0}))
    assert "its description has lora_alpha = 0, which is not what lora.alpha takes" in error_of(
        f"--lora.adapter {folder}"
    )
    for odd, said in (("[]", "is of no LoRA adapter"), ("{", "Expecting property name")):
        (folder / "adapter_config.json").write_text(odd)
        assert said in error_of(f"--lora.adapter {folder}")
    assert f"lora.adapter: cannot read {folder}/gone/adapter_config.json: No such file" in error_of(
        f"--lora.adapter {folder}/gone"
    )


@pytest.mark.parametrize("engine", ["padded", "server --rollout.server http://localhost:1"])
def test_float8_is_kept_in_pages_alone(engine: str) -> None:
    said = error_of(
        "--job.task grpo --rewards.functions length --rollout.cache_dtype float8 "
        f"--rollout.engine {engine} --rollout.server_folder f"
    )
    assert "rollout.cache_dtype, rollout.engine: only pages take the first" in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        *(
            (f"--{name} {value}", f"{name}: should be from 0.01 to 100")
            for name in ("rollout.temperature", "validation.temperature")
            for value in ("1e-40", "1e39")
        ),
        ("--rollout.validation_temperature 1e-3", "should be from 0.01 to 100, or 0"),
        ("--distillation.temperature 1e-46", "should be from 0.01 to 100"),
        ("--rollout.temperature 0", "rollout.temperature"),
        *(
            (f"--{name} 100000000000000000000", name)
            for name in (
                "rewards.timeout_seconds",
                "rewards.code_seconds",
                "rollout.server_timeout",
                "comm.init_timeout_seconds",
                "comm.train_timeout_seconds",
                "comm.save_timeout_seconds",
            )
        ),
    ],
)
def test_numbers_that_nothing_can_be_done_by_are_refused(flags: str, reason: str) -> None:
    assert reason in error_of(flags)


def test_a_decay_that_would_change_rows_that_do_not_learn_is_refused() -> None:
    text = '[data]\ndataset = "org/data"\n[[optimizer.groups]]\npattern = "*"\nweight_decay = {}\n'
    flags = "--model.new_tokens <a>,<b> --model.train_new_tokens_only"
    said = error_of(flags, text=text.format(0.5))
    assert "model.train_new_tokens_only, optimizer.groups: its weight_decay would change" in said
    load(flags, text=text.format(0.0))

"""TOML and flags become one strict, frozen configuration, and every mistake is named."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from lacuna.config import Config, UserError, load_config
from lacuna.config.aliases import MEANT
from lacuna.config.optimizers import LRSchedulerConfig
from lacuna.config.parse import FIELDS, SPELLINGS
from lacuna.config.sections import TrainingConfig

BASE = '[model]\nconfig = "org/model"\n[data]\ndataset = "org/data"\n'


@pytest.fixture
def toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.toml"):
        (tmp_path / name).write_text(BASE + text)
        return name

    return write


def error_of(path, *flags):
    with pytest.raises(UserError) as error:
        load_config(path, list(flags))
    return str(error.value)


def test_file_name_gives_the_run_its_name_and_folder(toml):
    config = load_config(toml("", "tiny.toml"), [])
    assert (config.job.name, config.job.dump_folder) == ("tiny", "outputs/tiny")
    config = load_config(toml(""), ["--job.name", "other"])
    assert (config.job.name, config.job.dump_folder) == ("other", "outputs/other")


def test_without_a_name_a_run_is_called_after_its_folder(toml):
    for path in (toml("", "tiny.toml"), None):
        flags = [] if path else ["--model.config", "org/model", "--data.dataset", "org/data"]
        config = load_config(path, [*flags, "--job.dump_folder", "exp/first/"])
        assert (config.job.name, config.job.dump_folder) == ("first", "exp/first/")
        assert (
            load_config(path, [*flags, "--job.dump_folder=exp/first", "--job.name=one"]).job.name
            == "one"
        )
    assert load_config(None, flags).job.dump_folder == "outputs/run", (
        "nobody's, and not the quickstart's"
    )


@pytest.mark.parametrize("name", ["../../x", "..", ".", "", "a/../..", "a\0b"])
def test_a_name_that_leaves_outputs_is_refused(toml, name):
    message = error_of(toml(f"[job]\nname = {json.dumps(name)}\n"))
    assert message.startswith("job.name: ") and "job.dump_folder" in message


def test_without_a_file_the_quickstart_is_read():
    config = load_config(None, ["--training.seed", "7"])
    assert config.job.name == "quickstart" and config.training.seed == 7
    assert config.validation.prompts and config.compile.enable is False


@pytest.mark.parametrize(
    "flags",
    [
        "--model.name_or_path org/model --data.dataset org/data",
        "--model.config org/model --training.dataset org/data",
        "--model.config=org/model --data.dataset=json --data.data-files=*.json",
    ],
)
def test_flags_that_name_a_model_or_data_take_nothing_from_the_quickstart(toml, flags):
    sections = load_config(None, flags.split()).model_dump()
    plain = Config().model_dump()
    named = ("model", "data", "job")
    assert {name: sections[name] for name in plain if name not in named} == {
        name: plain[name] for name in plain if name not in named
    }
    assert sections["model"]["tokenizer_path"] is None


def test_a_flag_that_names_only_a_model_or_only_data_is_told_what_lacks(toml):
    assert error_of(None, "--model.name_or_path", "org/model").startswith(
        "data.dataset: no data is given"
    )
    assert error_of(None, "--data.dataset", "org/data").startswith(
        "model.name_or_path, model.config: "
    )


def test_flags_win_over_the_file_even_under_another_name(toml):
    path = toml("[training]\nbatch_size = 4\n")
    assert load_config(path, ["--training.local_batch_size", "2"]).training.batch_size == 2


def test_defaults_that_follow_from_other_settings(toml):
    path = toml("")
    assert load_config(path, []).training.steps == 10_000
    assert load_config(path, ["--training.epochs", "2"]).training.steps is None
    assert load_config(path, ["--training.seq_len", "64"]).training.context_len == 64
    assert load_config(path, []).training.gradient_accumulation_steps is None
    assert load_config(path, []).compile.enable is None


def test_dashes_and_underscores_are_the_same(toml):
    path = toml("[lr-scheduler]\nwarmup-steps = 3\n")
    config = load_config(path, ["--training.batch-size=3", "--lr-scheduler.decay_type", "sqrt"])
    assert config.lr_scheduler.warmup_steps == 3
    assert config.training.batch_size == 3 and config.lr_scheduler.decay_type == "sqrt"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--data.shuffle"], True),
        (["--data.shuffle", "true"], True),
        (["--data.shuffle", "False"], False),
        (["--data.shuffle", "no"], False),
        (["--data.shuffle=false"], False),
        (["--data.shuffle", "--training.seed", "1"], True),
    ],
)
def test_boolean_flags(toml, words, value):
    assert load_config(toml(""), words).data.shuffle is value


@pytest.mark.parametrize("words", [["a/b,c/d"], ["a/b, c/d"], ["a/b", "c/d"], ["a/b,", "c/d"]])
def test_list_flags_take_commas_and_several_words(toml, words):
    config = load_config(toml(""), ["--data.dataset", *words, "--data.data_probs", "1", "3"])
    assert config.data.dataset == ("a/b", "c/d") and config.data.data_probs == (1.0, 3.0)


@pytest.mark.parametrize("word", ['["<|a|>", "b,c"]', "['<|a|>','b,c']", '["<|a|>",\n"b,c"]'])
def test_list_flags_take_lists_as_toml_and_json_write_them(toml, word):
    config = load_config(toml(""), ["--data.dataset", word, "--data.data_probs", "[1, 3]"])
    assert config.data.dataset == ("<|a|>", "b,c") and config.data.data_probs == (1.0, 3.0)


def test_list_flags_take_other_words_in_brackets_as_they_are(toml):
    config = load_config(toml(""), ["--data.dataset", "[a],[b]", "--data.data_probs", "1,3"])
    assert config.data.dataset == ("[a]", "[b]")


def test_lists_in_toml_are_arrays_or_comma_strings(toml):
    text = "[training]\ndata_probs = {}\n"
    flags = ["--data.dataset", "a/b,c/d"]
    assert load_config(toml(text.format("[1, 3]")), flags) == load_config(
        toml(text.format('"1,3"')), flags
    )


def test_prompts_keep_their_commas(toml):
    path = toml('[validation]\nprompts = ["Once, upon", "a time"]\n')
    assert load_config(path, []).validation.prompts == ("Once, upon", "a time")
    flagged = load_config(path, ["--validation.prompts", "So, then", "what"])
    assert flagged.validation.prompts == ("So, then", "what")


def test_the_word_none_takes_a_setting_of_the_file_away(toml):
    path = toml("[training]\nsteps = 7\n")
    config = load_config(path, ["--training.steps", "none", "--training.epochs", "1"])
    assert config.training.steps is None and config.training.epochs == 1
    assert (
        load_config(path, ["--activation_checkpoint.mode", "none"]).activation_checkpoint.mode
        == "none"
    )
    assert (
        load_config(path, ["--packing.mode", "none"]).packing.mode == "none"
    )  # a value of its own, not the default


def test_integers_serve_as_numbers(toml):
    assert load_config(toml("[optimizer]\nlr = 1\n"), []).optimizer.lr == 1.0


@pytest.mark.parametrize(("word", "value"), [(".9", 0.9), ("9e-1", 0.9), ("0", 0.0)])
def test_numbers_after_a_flag_may_be_written_in_any_way(toml, word, value):
    assert load_config(toml(""), ["--optimizer.beta1", word]).optimizer.beta1 == value


def test_home_folder_is_expanded(toml, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(toml(""), ["--data.dataset=~/"]).data.dataset == (f"{tmp_path}/",)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("training.seq_ln", "training.seq_len"),
        ("trainin.steps", "training.steps"),
        ("training.lr", "optimizer.lr"),
        ("checkpoint.dump_folder", "job.dump_folder"),
        ("experimental.context_parallel_degre", "parallelism.context_parallel_degree"),
        ("training.wamup_steps", "lr_scheduler.warmup_steps"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("training.learning_rate", "optimizer.lr"),
        ("training.num_train_epochs", "training.epochs"),
    ],
)
def test_unknown_name_is_an_error_that_names_the_nearest(toml, name, nearest):
    assert error_of(toml(""), f"--{name}", "1").endswith(f"the nearest is {nearest}")
    section, _, key = name.partition(".")
    message = error_of(toml(f"[{section}]\n{key} = 1\n"))
    assert (
        name in message and message.endswith(f"the nearest is {nearest}") and "run.toml" in message
    )


def test_unknown_section_or_setting_outside_a_section_is_an_error(toml):
    assert "trainng: there is no such setting" in error_of(toml("[trainng]\n"))
    assert error_of(toml("", "a.toml"), "--steps", "3").endswith("the nearest is training.steps")


def test_unknown_field_of_a_source_names_the_nearest(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nconfig = "a/b"\n[[data.sources]]\ndataset = "a/b"\nwieght = 1\n')
    message = error_of(str(path))
    assert "data.sources[0].wieght: there is no such setting (got 1" in message
    assert "did you mean weight?" in message


@pytest.mark.parametrize(
    ("line", "setting", "wanted"),
    [
        (
            'training.steps = "100"',
            "training.steps",
            'a valid integer (got "100" in run.toml); write it without',
        ),
        ("training.steps = 1.5", "training.steps", "a valid integer (got 1.5"),
        ("training.steps = true", "training.steps", "a valid integer (got true"),
        ("training.steps = 0", "training.steps", "greater than 0 (got 0"),
        ("training.steps = [1]", "training.steps", "a valid integer (got [1]"),
        ('training.varlen = "true"', "training.varlen", "a valid boolean"),
        ("training.varlen = 1", "training.varlen", "a valid boolean"),
        ("optimizer.lr = nan", "optimizer.lr", "finite number"),
        ("optimizer.beta1 = 1.0", "optimizer.beta1", "less than 1"),
        (
            "lr_scheduler.lr_min = 3e-4\nlr_scheduler.decay_ratio = 1.5",
            "lr_scheduler.decay_ratio",
            "less than",
        ),
        ('lr_scheduler.decay_type = "cosin"', "lr_scheduler.decay_type", "did you mean cosine?"),
        ("model.tokenizer_path = 3", "model.tokenizer_path", "a valid string (got 3"),
        (
            'training.data_probs = "1,b"',
            "data.data_probs[1]",
            'a valid number (got "b" in run.toml',
        ),
        ('training.data_probs = ["one"]', "data.data_probs[0]", "a valid number"),
        ("data.dataset_split = [1]", "data.dataset_split[0]", "a valid string"),
        ("data.sources = 3", "data.sources", "a list"),
        ("checkpoint.load_step = -2", "checkpoint.load_step", "greater than or equal to -1"),
        ('optimizer.name = "Adam"', "optimizer.name", "'AdamW'"),
        ("checkpoint.interval = 2025-01-01", "checkpoint.interval", "a valid integer"),
    ],
)
def test_wrong_value_shows_setting_given_and_wanted(tmp_path, monkeypatch, line, setting, wanted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(f'{line}\nmodel.config = "a/b"\ndata.dataset = "a/b"\n')
    message = error_of("run.toml")
    assert message.startswith(f"{setting}: ") and wanted in message
    assert len(message.splitlines()) == 1


def test_wrong_word_after_a_flag_shows_where_it_stands(toml):
    assert 'valid integer (got "ten" on the command line)' in error_of(
        toml(""), "--training.steps", "ten"
    )
    assert "a valid boolean" in error_of(toml(""), "--training.varlen", "maybe")
    assert "needs a value" in error_of(toml(""), "--training.steps")
    assert "needs a value" in error_of(toml(""), "--experimental.pipeline_parallel_schedule")
    assert "takes one value" in error_of(toml(""), "--training.steps", "3", "run.toml")
    assert "without a flag" in error_of(toml(""), "stray", "--training.steps", "3")
    assert "as training.warmup_steps" in error_of(toml(""), "--training.warmup_steps", "-1")


def test_all_mistakes_are_reported_together(toml):
    path = toml('[training]\nsteps = "9"\nseq_ln = 3\nvarlen = true\n')
    names = [
        line.partition(":")[0] for line in error_of(path, "--optimizer.lr", "fast").splitlines()
    ]
    assert names == [
        "training.steps",
        "training.seq_ln",
        "optimizer.lr",
        "training.batch_size, training.varlen",
    ]


def test_a_mistake_does_not_drag_others_along(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nconfg = "a/b"\n[data]\ndataset = 3\n')
    lines = error_of(str(tmp_path / "run.toml")).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["model.confg", "data.dataset"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("training.batch_size 4", "training.local_batch_size 8"),
        ("optimizer.fused false", "optimizer.implementation fused"),
        ("optimizer.scheduler cosine", "lr_scheduler.decay_type sqrt"),
        ("metrics.save_for_all_ranks", "metrics.rank_0_only"),
        ("training.compile", "compile.enable false"),
        ("training.tensor_parallel_degree 1", "experimental.tensor_parallel_degree 2"),
    ],
)
def test_a_setting_given_twice_with_different_values_names_both(toml, first, second):
    words = [*f"--{first}".split(), *f"--{second}".split()]
    message = error_of(toml(""), *words)
    assert "given twice" in message
    assert first.split()[0] in message and second.split()[0] in message


def test_of_a_flag_given_twice_the_last_counts(toml):
    words = [
        "--training.batch-size",
        "many",
        "--training.batch_size",
        "4",
        "--training.batch_size=8",
    ]
    assert load_config(toml(""), words).training.batch_size == 8
    assert load_config(toml(""), ["--data.shuffle", "false", "--data.shuffle"]).data.shuffle is True


def test_a_setting_given_twice_with_one_value_is_fine(toml):
    words = [
        "--training.batch_size",
        "4",
        "--training.local_batch_size",
        "4",
        "--training.batch_size=4",
    ]
    assert load_config(toml(""), words).training.batch_size == 4


def test_two_spellings_in_one_file_conflict(toml):
    message = error_of(toml("[training]\nwarmup_steps = 3\n[lr_scheduler]\nwarmup_steps = 4\n"))
    assert "training.warmup_steps = 3" in message and "lr_scheduler.warmup_steps = 4" in message


def test_wsd_leaves_a_given_decay_ratio_alone(toml):
    path = toml("[lr_scheduler]\ndecay_ratio = 0.4\n")
    assert load_config(path, ["--optimizer.scheduler", "wsd"]).lr_scheduler.decay_ratio == 0.4
    path = toml('[optimizer]\nscheduler = "wsd"\n')
    assert load_config(path, []).lr_scheduler.decay_ratio == 0.1
    assert load_config(path, ["--lr_scheduler.decay_ratio", "0.3"]).lr_scheduler.decay_ratio == 0.3
    assert load_config(path, ["--optimizer.scheduler", "cosine"]).lr_scheduler.decay_ratio is None
    scheduler = LRSchedulerConfig(decay_type="wsd")
    assert scheduler.decay_ratio == 0.1
    assert Config(lr_scheduler=scheduler).lr_scheduler == scheduler


@pytest.mark.parametrize(
    ("flags", "section", "field", "value"),
    [
        ("--metrics.save_for_all_ranks", "metrics", "rank_0_only", False),
        ("--lr_scheduler.min_lr_factor 0.5", "lr_scheduler", "lr_min", 0.5),
        ("--checkpoint.enable false", "checkpoint", "enable_checkpoint", False),
        ("--checkpoint.last_save_model_weights_only", "checkpoint", "model_weights_only", True),
        ("--checkpoint.last_save_model_only", "checkpoint", "model_weights_only", True),
        ("--model.hf_assets_path org/assets", "model", "tokenizer_path", "org/assets"),
        (
            "--training.fsdp_reshard_after_forward never",
            "parallelism",
            "fsdp_reshard_after_forward",
            "never",
        ),
        ("--debug.seed 3", "training", "seed", 3),
        ("--job.print_config", "job", "print_args", True),
    ],
)
def test_names_of_torchtitan(toml, flags, section, field, value):
    assert getattr(getattr(load_config(toml(""), flags.split()), section), field) == value


def test_wrong_value_of_a_converted_name_lists_its_values(toml):
    message = error_of(toml(""), "--optimizer.scheduler", "wds")
    assert "'linear'" in message and "'cosine'" in message and "did you mean wsd?" in message
    message = error_of(toml('[optimizer]\nfused = "yes"\n'))
    assert "'fused', 'foreach'" in message and "as optimizer.fused" in message


def test_shipped_recipe_and_model_configuration_are_found_by_name(toml):
    config = load_config("quickstart.toml", [])
    assert config == load_config(None, [])
    flags = ["--model.config", "quickstart_llama.json"]
    assert load_config(toml(""), flags).model.config == config.model.config


def test_a_byte_order_mark_before_the_file_is_no_part_of_it(toml):
    path = toml("[training]\nseed = 7\n")
    with open(path, "rb") as file:
        text = file.read()
    with open(path, "wb") as file:
        file.write(b"\xef\xbb\xbf" + text)
    assert load_config(path, []).training.seed == 7


def test_missing_or_broken_file_says_so(toml, tmp_path):
    toml("", "mine.toml")
    assert "did you mean mine.toml?" in error_of("mien.toml")
    assert "there is no folder nowhere" in error_of("nowhere/run.toml")
    assert "Is a directory" in error_of(str(tmp_path))
    assert "at line 5" in error_of(toml("steps = = 3\n"))


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'[' * 2000}{']' * 2000}",
        f"x = {'{a=' * 2000}1{'}' * 2000}",
        f"[data.dataset{'.a' * 2000}]\nx = 1",
        f"[model]\nconfig{'.a' * 2000} = 1",
        f"[x{'.a' * 2000}]",
    ],
    ids=["arrays", "inline", "of a setting", "dotted", "unknown"],
)
def test_tables_nested_without_end_are_refused_in_one_message(tmp_path, text):
    (tmp_path / "deep.toml").write_text(text)
    message = error_of(str(tmp_path / "deep.toml"))
    assert "deep.toml" in message and len(message) < 1000


def test_names_of_other_programs_propose_settings_that_there_are():
    assert set(MEANT.values()) <= {*FIELDS, "--dry-run"}
    assert not {spelling.rpartition(".")[2] for spelling in SPELLINGS} & set(MEANT)


def test_configuration_is_frozen_and_refuses_unknown_fields(toml):
    config = load_config(toml(""), [])
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.training.steps = 3
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.training = None
    with pytest.raises(pydantic.ValidationError, match="Extra inputs"):
        Config(training={"stps": 3})


def test_configuration_can_be_built_from_sections():
    training = TrainingConfig(epochs=2, seq_len=64)
    assert Config(training=training).training == training
    assert (training.steps, training.context_len) == (None, 64)
    assert TrainingConfig().steps == 10_000


def test_reading_settings_loads_no_heavy_library():
    heavy = "{'torch', 'transformers', 'datasets'}"
    code = f"import lacuna.commands.arguments, sys; print(*{heavy} & {{*sys.modules}})"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )


def test_what_is_no_toml_file_is_answered_by_one_that_is_meant(toml, tmp_path):
    assert "did you mean sft.toml?" in error_of("sfft.toml")
    assert "resembles it" in error_of("x.toml"), "endings are all the same"
    (tmp_path / "sfft2.toml").write_text("")
    assert "did you mean sfft2.toml?" in error_of(str(tmp_path / "sfft3.toml"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    assert f"give {tmp_path / 'run' / 'config.toml'}" in error_of(str(tmp_path / "run"))
    assert "one TOML file is all that a run takes" in error_of(toml(""), "other.toml")
    assert "write --training.steps" in error_of(toml(""), "-training.steps")


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_completions_that_are_trained_are_drawn_from_the_whole_vocabulary(toml, name):
    message = error_of(toml(""), f"--rollout.{name}", "1")
    assert message.startswith(f"rollout.{name}: is not accepted: ")
    assert "the whole vocabulary at rollout.temperature" in message


@pytest.mark.parametrize("page", ["grpo", "ppo"])
def test_settings_that_pages_on_rewards_show_are_valid_and_short(page, tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    run, *more = re.findall("```toml\n(.*?)```", text, re.DOTALL)
    assert len(run.splitlines()) <= 20 and f'task = "{page}"' in run
    monkeypatch.chdir(tmp_path)
    for folder in ("outputs/sft/hf", "outputs/reward/hf"):
        (tmp_path / folder).mkdir(parents=True)
    for data in ("questions.jsonl", "held_out.jsonl"):
        (tmp_path / data).write_text("")
    for part in ("", *more):
        (tmp_path / "run.toml").write_text(f"{run}{part}")
        assert load_config("run.toml", []).job.task == page

"""The help tells of every setting."""

import pytest

from lacuna.commands.arguments import help_text, parse_run
from lacuna.config import Config, UserError
from lacuna.config.documents import CurriculumStage, Source
from lacuna.config.optimizers import OptimizerGroup
from runs import lacuna, refused


def test_every_setting_and_section_has_its_help():
    for section, info in Config.model_fields.items():
        table = help_text(999).split(f"\n[{section}]  ")[1].partition("\n[")[0]
        heading, *settings = table.split("\n  --")
        told = {f"--{words.split()[0]}": words.partition("\n")[2].strip() for words in settings}
        assert told.keys() == {f"--{section}.{name}" for name in info.annotation.model_fields}
        assert heading.endswith(".") and all(
            len(text) > 15 and text[0].isupper() for text in told.values()
        ), told


def test_each_setting_is_documented_below_it_and_a_section_in_one_line():
    sections = [info.annotation for info in Config.model_fields.values()]
    for section in (*sections, Source, CurriculumStage, OptimizerGroup):
        assert len(section.__doc__.splitlines()) == 1
        assert all(field.description for field in section.model_fields.values()), section


def printed(capsys, *words: str) -> str:
    with pytest.raises(SystemExit):
        parse_run(words[0], "\n\nusage\n", [*words[1:]])
    return capsys.readouterr().out


def test_help_of_a_section_is_that_section_alone(capsys):
    for words in (("train", "--help", "lora"), ("plan", "run.toml", "-h", "lora.rank")):
        text = printed(capsys, *words)
        assert text.startswith("[lora]") and "--lora.rank int" in text and text.count("\n[") == 0
    assert printed(capsys, "data", "--help", "lr-scheduler").startswith("[lr_scheduler]")
    with pytest.raises(UserError, match="no such section; did you mean lora"):
        parse_run("train", "", ["--help", "lorra"])


def test_help_of_several_sections_is_all_of_them_in_order(capsys):
    text = printed(capsys, "train", "--help", "rollout", "grpo.beta", "--training.steps", "5")
    assert text.startswith("[rollout]") and "\n[grpo]" in text and text.count("\n[") == 1
    with pytest.raises(UserError, match="--help grop: there is no such section; did you mean grpo"):
        parse_run("train", "", ["--help", "rollout", "grop"])


def test_help_alone_goes_by_the_words_after_it():
    text = lacuna("--help", "rollout", "grpo")
    assert text.startswith("[rollout]") and "\n[grpo]" in text
    assert lacuna("help", "generate").startswith("usage: lacuna generate")
    assert "\n  lacuna generate MODEL" in lacuna("--help")
    assert "--help rolout: there is no such section; did you mean rollout?" in refused(
        "--help", "rolout"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "m", "--promt", "hi"], "--promt is not understood; did you mean --prompt? "),
        (["generate", "m", "hello", "--prompt", "hi"], "hello is not understood. "),
        (["bloat", "--all"], "--all is not understood. "),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(words, said):
    assert refused(*words) == f"lacuna: lacuna {words[0]}: {said}See lacuna {words[0]} --help.\n"


def test_only_train_lists_all_settings(capsys):
    assert "--lora.rank" in printed(capsys, "train", "--help")
    for command in ("plan", "data"):
        text = printed(capsys, command, "--help")
        assert (
            len(text.splitlines()) < 10 and "lacuna train --help" in text and "qlora.toml" in text
        )


def test_help_is_plain_lines_that_fit(capsys):
    assert max(map(len, help_text(80).splitlines())) <= 100
    assert "(default: 8)" in help_text() and "linear|sqrt|cosine|constant" in help_text()

"""The help tells of every setting, and a configuration survives being written as TOML."""

import re
import tomllib

import pytest

from lacuna.config import Config, load_config
from lacuna.config.describe import help_text, to_toml

SETTINGS = [
    (section, name, field)
    for section, info in Config.model_fields.items()
    for name, field in info.annotation.model_fields.items()
]


def test_every_setting_and_section_has_its_help():
    for section, info in Config.model_fields.items():
        table = help_text(999).split(f"\n[{section}]  ")[1].partition("\n[")[0]
        heading, *settings = table.split("\n  --")
        told = {f"--{words.split()[0]}": words.partition("\n")[2].strip() for words in settings}
        assert told.keys() == {f"--{section}.{name}" for name in info.annotation.model_fields}
        assert heading.endswith(".") and all(len(text) > 15 and text[0].isupper() for text in told.values()), told


def test_the_docstring_of_a_section_tells_of_its_settings_and_no_others():
    for info in Config.model_fields.values():
        told = re.findall(r"^    (\w+): ", info.annotation.__doc__, re.MULTILINE)
        assert told == list(info.annotation.model_fields)


def test_help_is_plain_lines_that_fit(capsys):
    assert max(map(len, help_text(80).splitlines())) <= 100
    assert "(default: 8)" in help_text() and "linear|sqrt|cosine|constant" in help_text()


def read_back(tmp_path, config):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    return load_config(str(path), [])


def test_written_toml_reads_back_equal(tmp_path):
    text = r"""
        model.config = "org/model"
        job.description = "quotes \" and \\ and\ttabs\nlines, \u00e9 \U0001F600 \u007f \u0001"
        optimizer.eps = 1e-15
        validation.prompts = ["a, b", 'c "d"', ""]
        validation.dataset = "org/held-out"
        checkpoint.load_step = -1
        training.epochs = 3
        [[data.sources]]
        dataset = "org/one"
        files = ["a.json", "b.json"]
        [[data.sources]]
        dataset = "org/two"
        split = "train[:10%]"
    """
    (tmp_path / "run.toml").write_text(text)
    config = load_config(str(tmp_path / "run.toml"), [])
    assert read_back(tmp_path, config) == config


def test_written_toml_with_lists_reads_back_equal(tmp_path):
    stages = (
        "[[curriculum.stages]]\nfrom_step = 5\ndata_probs = [0, 1.5]\n[[curriculum.stages]]\nfrom_step = 6\nseq_len = 9"
    )
    (tmp_path / "run.toml").write_text(f'[model]\nname_or_path = "org/model"\n{stages}\n')
    flags = ["--data.dataset", "a/b,c/d", "--data.data_probs", "1e-7,0.1", "--data.dataset_name", "x,"]
    config = load_config(str(tmp_path / "run.toml"), flags)
    assert read_back(tmp_path, config) == config


@pytest.mark.parametrize(("section", "name", "field"), SETTINGS, ids=[f"{s}.{n}" for s, n, _ in SETTINGS])
def test_written_toml_mentions_every_setting(section, name, field):
    written = to_toml(Config())
    table = written.split(f"[{section}]\n")[1].split("\n\n")[0]
    assert f"\n{name} = " in f"\n{table}" or f"# {name} is not set" in table
    assert name in tomllib.loads(written)[section] or getattr(getattr(Config(), section), name) is None

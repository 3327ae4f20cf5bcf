"""A configuration survives being written as TOML."""

import tomllib

import pytest

from lacuna.config import Config, load_config, to_toml

SETTINGS = [
    (section, name, field)
    for section, info in Config.model_fields.items()
    for name, field in info.annotation.model_fields.items()
]


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
        "[[curriculum.stages]]\nfrom_step = 5\ndata_probs = [0, 1.5]\n"
        "[[curriculum.stages]]\nfrom_step = 6\nseq_len = 9"
    )
    (tmp_path / "run.toml").write_text(f'[model]\nname_or_path = "org/model"\n{stages}\n')
    flags = [
        "--data.dataset",
        "a/b,c/d",
        "--data.data_probs",
        "1e-7,0.1",
        "--data.dataset_name",
        "x,",
    ]
    config = load_config(str(tmp_path / "run.toml"), flags)
    assert read_back(tmp_path, config) == config


@pytest.mark.parametrize(
    ("section", "name", "field"), SETTINGS, ids=[f"{s}.{n}" for s, n, _ in SETTINGS]
)
def test_written_toml_mentions_every_setting(section, name, field):
    written = to_toml(Config())
    table = written.split(f"[{section}]\n")[1].split("\n\n")[0]
    assert f"\n{name} = " in f"\n{table}" or f"# {name} is not set" in table
    assert (
        name in tomllib.loads(written)[section] or getattr(getattr(Config(), section), name) is None
    )

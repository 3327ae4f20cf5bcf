"""A run sends models to the Hub, keeps its token secret, and ends well whatever the Hub does."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from fake_hub import TOKEN, FakeHub, fake_hub
from lacuna.config import UserError, load_config
from runs import curve, together, train, weights

UPLOAD = (
    "--checkpoint.hf_upload_enabled",
    "--checkpoint.hf_repo_base_name",
    "org/model",
    "--training.steps",
    4,
    "--checkpoint.interval",
    2,
)


Sent = dict[str, tuple[Path, str, FakeHub]]


@pytest.fixture(scope="module")
def sent(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Sent:
    """By a run's name its folder, what it printed and what the Hub got."""
    wait = ("--checkpoint.hf_upload_background", "false")
    kinds = {
        "waits": ({}, True, (*UPLOAD, *wait)),
        "refused": ({"status": 403}, True, UPLOAD),
        "no token": ({}, False, UPLOAD),
    }
    return sent_by(world, tmp_path_factory.mktemp("hub"), kinds)


@pytest.fixture(scope="module")
def more(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Sent:
    """The same of kinds that take longer."""
    folder = tmp_path_factory.mktemp("hub")
    wait = ("--checkpoint.hf_upload_background", "false")
    kinds = {
        "two ranks": (
            {},
            True,
            (*UPLOAD, *wait, "--cpus", 2, "--training.batch_size", 2, "--lora.rank", 2),
        ),
        "checkpoints": (
            {},
            True,
            (*UPLOAD, "--checkpoint.hf_upload_format", "dcp", "--checkpoint.async_mode=async"),
        ),
        "at the end": ({}, True, (*UPLOAD, "--checkpoint.hf_upload_when", "end")),
        # Until the run has made its last steps.
        "slow": ({"until": folder / "slow" / "hf"}, True, (*UPLOAD, "--checkpoint.interval", 1)),
    }
    return sent_by(world, folder, kinds)


def sent_by(
    world: Path, folder: Path, kinds: dict[str, tuple[dict[str, Any], bool, tuple[object, ...]]]
) -> Sent:
    def run(name: str) -> tuple[Path, str, FakeHub]:
        settings, token, flags = kinds[name]
        with fake_hub(**settings) as hub:
            home = folder / f"home of {name}"
            return (
                folder / name,
                train(world, folder / name, *flags, env=hub.environment(home, token), timeout=400),
                hub,
            )

    return dict(zip(kinds, together(*(lambda name=name: run(name) for name in kinds)), strict=True))


@pytest.mark.slow
def test_each_checkpoint_and_the_final_model_are_commits_with_tags(sent: Sent) -> None:
    folder, printed, hub = sent["waits"]
    assert {*hub.made} == {"org/model"}
    assert [message for message, _ in hub.commits] == ["step 2", "step 4"]
    assert hub.tags == ["step-2", "step-4"]
    (_, early), (_, final) = hub.commits
    assert final["model.safetensors"] == weights(folder)
    assert early.keys() == final.keys() == {path.name for path in (folder / "hf").iterdir()}
    assert load(early["model.safetensors"]).keys() == load(final["model.safetensors"]).keys()
    assert early["model.safetensors"] != final["model.safetensors"]
    assert "uploaded step-2 to org/model" in printed
    assert not [*folder.glob(".hub-*")]


@pytest.mark.slow
def test_training_is_the_same_and_adapters_go_along(sent: Sent, more: Sent) -> None:
    assert curve(sent["waits"][0]) == curve(sent["no token"][0])
    for _, files in more["two ranks"][2].commits:
        assert {
            "adapter/adapter_model.safetensors",
            "adapter/adapter_config.json",
            "config.json",
        } <= files.keys()


@pytest.mark.slow
def test_checkpoints_themselves_go_to_a_folder_of_their_name(more: Sent) -> None:
    folder, _, hub = more["checkpoints"]
    assert [message for message, _ in hub.commits] == ["step 2", "step 4", "step 4"]
    for step, (_, files) in zip((2, 4), hub.commits, strict=False):
        assert f"checkpoint/step-{step}/manifest.json" in files
        for path, content in files.items():
            assert (folder / path).read_bytes() == content
    assert "model.safetensors" in hub.commits[2][1]


@pytest.mark.slow
def test_the_end_alone_is_one_commit(more: Sent) -> None:
    assert [message for message, _ in more["at the end"][2].commits] == ["step 4"]


@pytest.mark.slow
def test_no_checkpoint_waits_for_an_upload_before_it(more: Sent) -> None:
    folder, printed, hub = more["slow"]
    assert [message for message, _ in hub.commits] == ["step 1", "step 4"]
    assert "is not uploaded: the one before is still on its way" in printed
    assert {path.name for path in (folder / "checkpoint").glob("step-*")} == {
        f"step-{step}" for step in range(1, 5)
    }


@pytest.mark.slow
def test_what_the_hub_refuses_is_said_and_the_run_goes_on(sent: Sent) -> None:
    folder, printed, hub = sent["refused"]
    assert hub.commits == []
    assert "step-2 could not be uploaded to org/model" in printed
    assert "step-4 could not be uploaded to org/model" in printed
    assert "Traceback" not in printed
    assert weights(folder) == weights(sent["waits"][0])


@pytest.mark.slow
def test_without_a_token_there_is_one_warning_and_nothing_is_sent(sent: Sent) -> None:
    folder, printed, hub = sent["no token"]
    assert printed.count("there is no token of the Hugging Face Hub") == 1
    assert "hf upload org/model" in printed
    assert hub.made == hub.commits == []
    assert weights(folder) == weights(sent["waits"][0])


@pytest.mark.slow
def test_the_token_is_told_to_the_hub_alone(sent: Sent) -> None:
    for name in ("waits", "refused"):
        folder, printed, hub = sent[name]
        assert hub.tokens == {f"Bearer {TOKEN}"}
        assert TOKEN not in printed
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
        assert not any(
            TOKEN.encode() in content for _, sent in hub.commits for content in sent.values()
        )


def test_half_of_the_settings_is_refused(world: Path) -> None:
    for flags, part in (
        (("--checkpoint.hf_upload_enabled",), "hf_repo_base_name: the second says where to"),
        (("--checkpoint.hf_repo_base_name", "org/model"), "nothing would be sent"),
        (
            ("--checkpoint.hf_upload_enabled", "--checkpoint.hf_repo_base_name", "a b"),
            "hf_repo_base_name",
        ),
    ):
        with pytest.raises(UserError, match=part):
            load_config(str(world / "run.toml"), flags)

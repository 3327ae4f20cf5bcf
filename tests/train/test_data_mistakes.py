"""A mistake in data that are tokenised while training ends the run, which has saved what it has."""

import json
from pathlib import Path

import pytest

from runs import steps, train

WAYS = {
    "alone": ("--training.batch_size", 4),
    "two ranks": ("--training.batch_size", 2, "--cpus", 2),
    "workers": ("--training.batch_size", 2, "--cpus", 2, "--data.num_workers", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_that_cannot_be_used_loses_no_step(
    way: str, world: Path, tmp_path: Path
) -> None:
    """Only the second rank meets it, in the fourth step."""
    talk = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "the cat sat"}]
    talks = [talk] * 14 + [[{"role": "user", "content": 5}, talk[1]]] + [talk] * 50
    lines = [json.dumps({"messages": messages}) + "\n" for messages in talks]
    (tmp_path / "talks.jsonl").write_text("".join(lines))
    flags = ("--job.task", "sft", "--chat.template", "chatml", "--training.steps", 9)
    flags += ("--model.new_tokens", "<|im_start|>,<|im_end|>", "--training.seq_len", 64)
    flags += ("--data.dataset", tmp_path / "talks.jsonl", "--data.shuffle", "false")
    flags += ("--data.tokenization", "online", "--packing.mode", "none")
    flags += ("--checkpoint.interval", 100, *WAYS[way])
    said = train(world, tmp_path / "run", *flags, status=2)
    [told] = [line for line in said.splitlines() if line.startswith("lacuna: ")]
    assert "talks.jsonl (split train), row 15, column messages" in told
    assert "Stopped and saved after step 3. Files that are mended are other data: a new run" in told
    assert steps(tmp_path / "run") == [3]
    said = train(world, tmp_path / "run", *flags, status=2)
    assert "resuming after step 3" in said and "Stopped and saved after step 3" in said
    (tmp_path / "mended.jsonl").write_text("".join(lines[:14] + lines[15:]))
    begins = ("--checkpoint.initial_load_path", tmp_path / "run" / "checkpoint" / "step-3")
    train(world, tmp_path / "new", *flags, "--data.dataset", tmp_path / "mended.jsonl", *begins)
    assert steps(tmp_path / "new")[-1] == 9

"""Conversations of several turns: a tokenizer of words, an environment, flags of a short run."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lacuna.config.fields import RECIPES

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ' ' + message.content + ' <end> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
WORDS = ("user", "assistant", "tool", "add", "plus", "is", *map(str, range(60)))

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<end>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>")

ENVIRONMENT = '''
import random

class Asking:
    """Goes on asking for so many turns as its seed says, in messages of uneven length."""

    tool_errors = 0

    def __init__(self, row, seed):
        self.random = random.Random(seed)
        self.number = len(row["prompt"].split())
        self.turns = 0

    def reply(self, text):
        self.turns += 1
        if self.random.random() < 0.3:
            return None
        self.tool_errors += "add" in text
        said = " ".join(["is"] * self.random.randint(1, 4) + [str(self.number + self.turns)])
        return [{"role": self.random.choice(["user", "tool"]), "content": said}]

    def reward(self):
        return self.turns


def odd(rows, completions):
    return [len(said.split()) % 2 for said in completions]
'''


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and special tokens with this template, or the packaged one so called."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*letters, *SPECIAL, "<|eot_id|>"))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<end>",
        eos_token="<end>",
        additional_special_tokens=[*SPECIAL[1:], "<|eot_id|>"],
    )
    if template in ("chatml", "llama3"):
        template = (RECIPES / "templates" / f"{template}.jinja").read_text()
    tokenizer.chat_template = template
    return tokenizer


def talker() -> PreTrainedTokenizerFast:
    """A tokenizer of words with a chat template that keeps all that was said."""
    vocabulary = {word: number for number, word in enumerate(("<unk>", "<end>", *WORDS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def talking_model() -> LlamaForCausalLM:
    """A tiny model of the talker's tokens whose every tenth token or so ends a turn."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(talker()),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    with torch.no_grad():
        # What the last layer finds has much in common everywhere; the end is in its direction.
        model.get_input_embeddings().weight.add_(0.2)
        model.get_output_embeddings().weight[1] += 0.08
    return model


def write_talks(folder: Path) -> Path:
    """Fills a folder with a tiny model that likes to end, prompts and an environment."""
    talker().save_pretrained(folder / "model")
    talking_model().save_pretrained(folder / "model")
    rows = [
        {"prompt": f"{first} plus {second}" + " is" * (first % 3), "answer": str(first + second)}
        for first in range(10)
        for second in range(10)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "asking.py").write_text(ENVIRONMENT)
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


def flags(talks: Path, *more: object) -> list[object]:
    """The flags of a run on the prompts of a folder, in which it must run as well."""
    return [
        *("--model.name_or_path", talks / "model", "--model.config", "none"),
        *("--data.dataset", talks / "prompts.jsonl"),
        *("--job.task", "grpo", "--training.seq_len", 48, "--training.batch_size", 4),
        *("--rollout.samples", 4, "--rollout.max_tokens", 24, "--rollout.turns", 4),
        *("--rollout.environment", "asking:Asking"),
        *("--rewards.functions", "environment,asking:odd"),
        *("--lr_scheduler.decay_type", "constant", "--chat.template", talks / "chat.jinja", *more),
    ]

"""GGUF files hold the model, its tokenizer and where it stops, as others and lacuna read them."""

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import gguf
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from gguf_models import (
    ANSWERED,
    CHATML,
    END,
    FAMILIES,
    ROWS,
    python_source,
    tiny_gguf_model,
    tokenizer_like,
)
from lacuna.config import UserError
from lacuna.data.unpacked import hf_folder
from lacuna.formats.gguf import TYPES, export_gguf, require_writable_type
from tiny import random_model

# What transformers 5.17 to 5.23 does not read: Gemma 1, biases of a Llama, the factors of Llama 3's
# rotation.
UNKNOWN_TO_TRANSFORMERS = ("gemma", "smollm", "llama3")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own for what is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    ids = torch.tensor([tokenizer(python_source(1)[0]).input_ids[:100]])
    with torch.no_grad():
        return model(ids).logits


def written(folder: Path, family: str, kind: str = "F16", **changes: Any) -> str:
    model, tokenizer = tiny_gguf_model(family, **changes)
    export_gguf(model, tokenizer, str(folder / f"{family}.gguf"), kind)
    assert os.listdir(folder) == [f"{family}.gguf"]
    return str(folder / f"{family}.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_holds_the_model_and_its_tokenizer(family: str, tmp_path: Path) -> None:
    model, tokenizer = tiny_gguf_model(family)
    file, expected, texts = (
        written(tmp_path, family),
        logits(model, tokenizer),
        # transformers' reader of such files composes no characters, as Qwen's tokenizer does (NFC).
        [text for text in python_source(9) if "<s>" not in text and is_normalized("NFC", text)],
    )
    ways: list[tuple[str, dict[str, str]]] = [(hf_folder(file), {})]
    if family not in UNKNOWN_TO_TRANSFORMERS:
        ways.append((str(tmp_path), {"gguf_file": os.path.basename(file)}))
    for place, how in ways:
        read = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **how)
        assert (logits(read, tokenizer) - expected).abs().max() < 2e-3 * expected.abs().max()
        if how and transformers.__version__ < "5.23":
            continue  # its own reader makes other tokenizers than the file says, or none
        reader = AutoTokenizer.from_pretrained(place, **how)
        assert reader(texts).input_ids == tokenizer(texts).input_ids
        assert (reader.eos_token, reader.bos_token) == (END, tokenizer.bos_token)


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_of_weights_is_read_as_what_the_package_makes_of_them(
    kind: str, tmp_path: Path
) -> None:
    model, _ = tiny_gguf_model("qwen2")
    file = written(tmp_path, "qwen2", kind)
    read = AutoModelForCausalLM.from_pretrained(hf_folder(file)).state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    wanted = gguf.GGMLQuantizationType[kind]
    quantised = gguf.quantize(model.state_dict()[name].numpy(), wanted)
    assert torch.equal(read[name].float(), torch.from_numpy(gguf.dequantize(quantised, wanted)))
    assert read[name].dtype == (torch.bfloat16 if kind == "BF16" else torch.float32)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert types["token_embd.weight"] == ("Q8_0" if kind.startswith("Q") else kind)
    assert types["blk.0.attn_norm.weight"] == types["blk.0.attn_q.bias"] == "F32"


def test_rows_that_no_block_divides_are_kept_in_16_bits(tmp_path: Path) -> None:
    file = written(tmp_path, "qwen2", "Q4_0", intermediate_size=80)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("F16", "Q4_0")


def test_the_file_tells_where_to_stop_and_how_to_chat(tmp_path: Path) -> None:
    file = written(tmp_path, "qwen2")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] == END
    assert tokens[fields["tokenizer.ggml.eot_token_id"]] == ANSWERED
    assert (
        len(tokens) == ROWS
        and tokens[-1] == f"[PAD{ROWS - 1}]"
        and kinds[-1] == gguf.TokenType.UNUSED
    )
    assert kinds[tokens.index(END)] == gguf.TokenType.CONTROL
    assert kinds[tokens.index("<think>")] == gguf.TokenType.USER_DEFINED
    template, chat = fields["tokenizer.chat_template"], [{"role": "user", "content": "Why?"}]
    chat.append({"role": "assistant", "content": "So."})
    tokenizer = tokenizer_like("qwen2")
    assert "generation %}" in CHATML and "generation %}" not in template
    assert tokenizer.apply_chat_template(
        chat, chat_template=template
    ) == tokenizer.apply_chat_template(chat)
    assert AutoModelForCausalLM.from_pretrained(hf_folder(file)).generation_config.eos_token_id == [
        tokens.index(END),
        tokens.index(ANSWERED),
    ]


def test_a_number_that_a_type_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    model, tokenizer = tiny_gguf_model("qwen2")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    for kind in ("F16", "Q8_0", "Q4_1"):
        with pytest.raises(
            UserError, match=r"layers.1.mlp.up_proj.weight has numbers above 65504.*--type BF16"
        ):
            export_gguf(model, tokenizer, str(tmp_path / "large.gguf"), kind)
        assert list(tmp_path.iterdir()) == []
    export_gguf(model, tokenizer, str(tmp_path / "large.gguf"), "BF16")


def unlike(**changes: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    return tiny_gguf_model("gemma", **changes)


def with_tokenizer(
    backend: Tokenizer, **names: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    return tiny_gguf_model("qwen2")[0], PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def other_tokenizer(kind: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    backend = Tokenizer.from_str(tokenizer_like("qwen2").backend_tokenizer.to_str())
    if kind == "words":
        backend = Tokenizer(models.WordLevel({"a": 0, END: 1}, unk_token="a"))
    elif kind == "bert":
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "spaces":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return with_tokenizer(backend, **({} if kind == "endless" else {"eos_token": END}))


def with_token(text: str, **changes: bool) -> PreTrainedTokenizerFast:
    tokenizer = deepcopy(tokenizer_like("qwen2"))
    tokenizer.add_tokens([AddedToken(text, normalized=False, **changes)])
    return tokenizer


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: (
                random_model(
                    BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "eager"
                ),
                tokenizer_like("gpt-2"),
            ),
            "no bloom model.*qwen2, qwen3",
        ),
        (
            lambda: unlike(tie_word_embeddings=False),
            r"no place for \['lm_head.weight'\] in a gemma",
        ),
        (lambda: unlike(hidden_act="silu"), "cannot hold hidden_act = silu"),
        (
            lambda: unlike(
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_parameters",
        ),
        (
            lambda: tiny_gguf_model("gemma2", attn_logit_softcapping=None),
            "attn_logit_softcapping = None",
        ),
        (lambda: tiny_gguf_model("gemma3", query_pre_attn_scalar=99), "query_pre_attn_scalar = 99"),
        (lambda: tiny_gguf_model("qwen3", attention_bias=True), "attention_bias = True"),
        (
            lambda: tiny_gguf_model("gpt2", scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx",
        ),
        (lambda: tiny_gguf_model("qwen2", vocab_size=300), "beyond the 300 rows"),
        (lambda: tiny_gguf_model("qwen2", head_dim=32), "cannot hold head_dim = 32"),
        (
            lambda: (tiny_gguf_model("qwen2")[0], with_token("<new>", rstrip=True)),
            "added tokens that take in blanks",
        ),
        (lambda: other_tokenizer("words"), "is WordLevel"),
        (lambda: other_tokenizer("bert"), "otherwise.*gpt-2, smollm, llama-bpe, qwen2, tekken"),
        (lambda: other_tokenizer("spaces"), "otherwise.*SentencePiece"),
        (lambda: other_tokenizer("endless"), "no token that ends"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(made: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        export_gguf(*made(), str(tmp_path / "new.gguf"), "F16")
    assert list(tmp_path.iterdir()) == []


def test_other_types_are_left_to_llama_quantize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_gguf_model("qwen2")
    program, file = tmp_path / "bin" / "llama-quantize", tmp_path / "out" / "new.gguf"
    program.parent.mkdir()
    answers = '[ "$3" = Q4_K_M ] || { echo "bad type $3" >&2; exit 1; }\ncp "$1" "$2"\n'
    program.write_text(f'#!/bin/sh\nprintf "\\344\\275"  # half a character\n{answers}')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    export_gguf(model, tokenizer, str(file), "Q4_K_M")
    assert os.listdir(file.parent) == ["new.gguf"]
    file.unlink()
    with pytest.raises(UserError, match="--type F32: the weights would go through 16 bits"):
        require_writable_type("F32")
    with pytest.raises(UserError, match=r"--type Q9.*bad type Q9"):
        export_gguf(model, tokenizer, str(file), "Q9")
    assert os.listdir(file.parent) == []

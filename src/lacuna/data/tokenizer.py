"""Loads tokenizers, tells them apart, and applies one to a text."""

import os
from functools import lru_cache

import numpy as np
from datasets.fingerprint import Hasher
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lacuna.config import UserError, explained
from lacuna.config.conversations import ChatConfig
from lacuna.config.documents import BUILT_IN
from lacuna.config.sections import ModelConfig
from lacuna.data.remote_code import open_with
from lacuna.data.unpacked import hf_folder


def tokenizer_source(model: ModelConfig) -> str:
    """Where the tokenizer comes from: as set, or else where the model or its configuration does."""
    source = str(model.tokenizer_path or model.name_or_path or model.config)
    return os.path.dirname(source) or "." if source.endswith(".json") else source


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hub id or folder, or the built-in one named python-stdlib.

    Raises UserError when there is none of that name.
    """
    if name_or_path == BUILT_IN:
        from lacuna.data.corpus import stdlib_tokenizer  # an extension

        return stdlib_tokenizer()
    absent = f"no tokenizer can be loaded from {name_or_path}"
    mend = (
        "set model.tokenizer_path to a Hub id, to a folder that holds a tokenizer, or to "
        f"{BUILT_IN}"
    )
    unfit = f"transformers refuses the configuration in {name_or_path}"
    errors = (StrictDataclassError, ArithmeticError, AttributeError, TypeError)
    with (
        explained(absent, OSError, ValueError, ImportError, mend=mend),
        explained(unfit, *errors, mend="mend it"),
    ):
        tokenizer: PreTrainedTokenizerBase = open_with(
            AutoTokenizer, hf_folder(name_or_path), trust_remote_code
        )
        return tokenizer


def grown_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, which knows `model.new_tokens`.

    Raises UserError when there is none, or a new token is not one token.
    """
    tokenizer = load_tokenizer(tokenizer_source(model), model.trust_remote_code)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens(
        [token for token in model.new_tokens if token not in known], special_tokens=True
    )
    for token in model.new_tokens:
        ids = tokenizer.encode(token, add_special_tokens=False)
        if not token.strip() or ids != [tokenizer.convert_tokens_to_ids(token)]:
            raise UserError(
                f"model.new_tokens: {token!r} becomes {ids} with the tokenizer of "
                f"{tokenizer_source(model)}, but must be one token, and more than white space; "
                "choose another text, such as <think>."
            )
    return tokenizer


def run_tokenizer(model: ModelConfig, chat: ChatConfig | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, with its new tokens and the template of the `chat` it trains on.

    Raises UserError where the settings name tokens or a template that cannot be used.
    """
    tokenizer = grown_tokenizer(model)
    if chat is not None:
        from lacuna.data.chat import use_template  # an extension

        use_template(tokenizer, chat)
    return tokenizer


def rows_of_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many rows of logits the tokens take: more than there are, where ids are left out."""
    return _rows_of(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _rows_of(tokenizer: PreTrainedTokenizerBase, _: int) -> int:
    """The same, found once for each number of tokens: ready-made tokens ask for every record."""
    return max(tokenizer.get_vocab().values()) + 1


def added_ids(model: ModelConfig) -> tuple[int, set[int]]:
    """How many ids a tokenizer has without `model.new_tokens`, and the ids that these add."""
    given = load_tokenizer(tokenizer_source(model), model.trust_remote_code)
    before = set(given.get_vocab().values())
    after = set(grown_tokenizer(model).get_vocab().values())
    return rows_of_tokens(given), after - before


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which tokens a text becomes."""
    content = _backend_of(tokenizer).to_str() if tokenizer.is_fast else Hasher.hash(tokenizer)
    return str(Hasher.hash([content, tokenizer.split_special_tokens, tokenizer.eos_token_id]))


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str, begins: bool = True) -> np.ndarray:
    """The tokens of a text, int32, with one end of text at the end.

    If the text `begins` a document, the tokenizer's post-processor adds its special tokens.
    """
    if tokenizer.is_fast:
        # A third faster than transformers' own call, which also tracks offsets.
        tokens = _backend_of(tokenizer).encode_batch_fast([text], add_special_tokens=begins)[0].ids
    else:
        tokens = tokenizer(
            text, add_special_tokens=begins, return_attention_mask=False, verbose=False
        )["input_ids"]
    if tokenizer.eos_token_id not in (None, *tokens[-1:]):
        tokens.append(tokenizer.eos_token_id)
    return np.array(tokens, dtype=np.int32)


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """What a fast tokenizer wraps, without the cutting and padding that transformers may set."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend

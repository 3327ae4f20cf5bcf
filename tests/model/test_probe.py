"""Before a run a model is tried in small.

What is not computed as by transformers' own code is refused, or avoided.
"""

import pytest
import torch
from transformers import PretrainedConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from every_model import configuration_class, model_types, small_config
from lacuna.config import Config, UserError
from lacuna.config.documents import DataConfig, PackingConfig
from lacuna.config.sections import TrainingConfig
from lacuna.model.attention import PACKED
from lacuna.model.probe import find_attention, rows_of
from lacuna.model.specimen import specimen
from tiny import CPU, tiny_config

ALL = ("sdpa", "eager", PACKED)


def found(
    kind: str | PretrainedConfig,
    *names: str,
    masked: bool = True,
    mode: str = "auto",
    **changes: object,
) -> str:
    """The attention that a run of a kind of model has, of those named or of all."""
    own = small_config(configuration_class(kind), **changes) if isinstance(kind, str) else kind
    data, packing = DataConfig(document_mask=masked), PackingConfig(mode=mode)
    config = Config(training=TrainingConfig(seq_len=64), data=data, packing=packing)
    return find_attention(names or ALL, own, rows_of(config.row_form), 64, CPU, torch.float32)


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "mistral", "gpt2", "deepseek_v3", "cohere2", "minicpm3"]
)
def test_the_first_choice_is_taken_where_it_is_exact(kind: str) -> None:
    assert found(kind, PACKED, "sdpa") == PACKED
    assert found(kind, "sdpa", PACKED) == "sdpa"


def test_a_model_that_builds_a_mask_itself_falls_back_to_one_that_keeps_it() -> None:
    assert found("doge", PACKED, "sdpa") == "sdpa"
    with pytest.raises(
        UserError, match=rf"DogeForCausalLM does not compute here .*{PACKED}: values differ"
    ):
        found("doge", PACKED)


@pytest.mark.parametrize("kind", ["llama4_text", "deepseek_v32"])
def test_chunks_and_sparse_attention_are_never_silently_left_out(kind: str) -> None:
    with pytest.raises(UserError, match=r"in packed rows .* set data\.document_mask = false"):
        found(kind)
    assert found(kind, masked=False) == "sdpa"
    with pytest.raises(UserError, match=rf"does not compute here .*{PACKED}"):
        found(kind, PACKED, masked=False)


@pytest.mark.parametrize("kind", ["granite_swa", "mimo_v2_flash", "flint"])
def test_sinks_and_windows_of_every_kind_are_ours(kind: str) -> None:
    if kind not in model_types():
        pytest.skip(f"the installed transformers has no {kind}")
    assert found(kind, PACKED) == PACKED


@pytest.mark.parametrize("kind", ["gpt_oss", "opt", "bert"])
def test_documents_that_transformers_does_not_keep_apart_are_packed_by_ours(kind: str) -> None:
    assert found(kind, "eager", PACKED) == PACKED


@pytest.mark.parametrize("kind", ["bloom", "mamba", "jamba", "openai-gpt"])
def test_where_packed_documents_see_each_other_the_message_says_what_can_be_had(kind: str) -> None:
    with pytest.raises(
        UserError,
        match=r"data\.document_mask: in packed rows .*packing\.mode = .none.*, or set data",
    ):
        found(kind, "eager")
    assert found(kind, "eager", mode="none") == found(kind, "eager", masked=False) == "eager"


@pytest.mark.parametrize("masked", [True, False])
def test_positions_that_are_counted_otherwise_are_refused(masked: bool) -> None:
    with pytest.raises(
        UserError,
        match="model: RobertaForCausalLM does not compute here what transformers' own code",
    ):
        found("roberta", masked=masked)


def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    with pytest.raises(
        UserError, match="model: in BertLMHeadModel tokens see later ones.*is_decoder"
    ):
        found("bert", is_decoder=False)


def test_blocks_in_which_tokens_see_later_ones_are_refused() -> None:
    said = "in BigBirdForCausalLM tokens see later ones.*original_full"
    for block in (8, 64):
        with pytest.raises(UserError, match=said):
            found("big_bird", mode="none", attention_type="block_sparse", block_size=block)
    assert found("big_bird", "eager", mode="none") == "eager"


def test_blocks_that_are_chosen_by_their_positions_are_refused_in_packed_rows() -> None:
    sparse = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}
    blocks = {"index_block_size": 128, "index_topk_blocks": 16}
    with pytest.raises(UserError, match="data.document_mask: in packed rows .*packing.mode"):
        found("minimax_m3_vl_text", **sparse, **blocks)
    chosen = found("minimax_m3_vl_text", mode="none", **sparse, **blocks)
    assert chosen in ("sdpa", "eager")


def test_a_model_that_does_not_run_by_its_own_code_is_refused_with_what_it_says() -> None:
    with pytest.raises(
        UserError, match="model: ReformerModelWithLMHead does not train by .*AssertionError"
    ):
        found("reformer")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmoe", "gpt2"])
@pytest.mark.parametrize("known", [2, 27, 40])
def test_models_of_few_tokens_are_tried_with_those(kind: str, known: int) -> None:
    own = small_config(configuration_class(kind), vocab_size=known, pad_token_id=None)
    assert found(own) in ALL


def test_a_specimen_is_the_same_each_time_and_leaves_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    one, other = specimen(tiny_config("mamba")), specimen(tiny_config("mamba"))
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_specimen_has_a_layer_of_every_kind_and_no_more() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 4
    model = specimen(tiny_config("gemma3", num_hidden_layers=8, layer_types=kinds))
    layers = model.model.layers
    assert len(layers) == 4
    assert layers[2].mlp.up_proj.weight is layers[0].mlp.up_proj.weight
    assert layers[3].mlp.up_proj.weight is not layers[0].mlp.up_proj.weight


def test_a_model_that_runs_in_float32_alone_is_refused_in_another_precision_by_that_setting() -> (
    None
):
    own = small_config(configuration_class("openai-gpt"))
    find_attention(("eager",), own, "padded", 64, CPU, torch.float32)
    with pytest.raises(
        UserError, match=r"mixed_precision_param: OpenAIGPTLMHeadModel computes in float32 only"
    ):
        find_attention(("eager",), own, "padded", 64, CPU, torch.bfloat16)


def test_a_model_for_other_rows_in_float32_alone_is_told_both() -> None:
    own = small_config(configuration_class("openai-gpt"))
    both = 'set training.mixed_precision_param = "float32", and set packing.mode = "none" to .*, or'
    with pytest.raises(UserError, match=both):
        find_attention(("eager",), own, "packed", 64, CPU, torch.bfloat16)
    with pytest.raises(UserError, match=r'\): set packing.mode = "none" to .*, or set data'):
        find_attention(("eager",), own, "packed", 64, CPU, torch.float32)


def test_a_soft_cap_is_part_of_what_a_model_computes_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some versions of transformers choose an attention for it that leaves the cap out.
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert found("gemma2", "eager", attn_logit_softcapping=1.0) == "eager"

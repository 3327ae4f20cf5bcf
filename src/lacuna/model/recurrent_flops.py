"""What recurrences of transformers' own hybrids compute for a token, beside its weights."""

from torch import nn

# Products of a head's state with a token's vectors: one writes to it, one reads it, and the delta
# rule reads once more before it writes.
_DELTA_RULE = 3
_SCAN = 2


def state_products(layers: nn.ModuleList) -> int:
    """The products of a token with states, [key width, value width] for each head, of all layers.

    They are those of the recurrence; kernels that go by chunks compute more, which is not counted.
    """
    total = 0
    for module in layers.modules():
        sizes = vars(module)
        if "head_k_dim" in sizes and "head_v_dim" in sizes:  # gated delta rules
            total += _DELTA_RULE * sizes["num_v_heads"] * sizes["head_k_dim"] * sizes["head_v_dim"]
        elif "ssm_state_size" in sizes:  # Mamba 1 and 2
            total += _SCAN * sizes["intermediate_size"] * sizes["ssm_state_size"]
        elif type(module).__name__.endswith("ForgetGate"):  # of Kimi's delta attention
            total += _DELTA_RULE * sizes["num_heads"] * sizes["head_dim"] ** 2
        elif type(module).__name__.endswith("LightningAttention"):  # MiniMax
            total += _SCAN * sizes["num_attention_heads"] * sizes["head_dim"] ** 2
    return total

"""Text from a model by transformers' own `generate`, also while it is sharded and compiled for training."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.data.chat import end_of_turn
from lacuna.parallel.fsdp import inference


def generate_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str,
    max_new_tokens: int, temperature: float, seed: int, chat: bool = False,
) -> str:  # fmt: skip
    """The completion of `prompt`, without the prompt, or with `chat` the answer to it. Temperature 0 is greedy.

    On a sharded model every rank must call it, and all draw the same tokens. Mode, attention and random state are
    left as they were.
    """
    device = next(model.buffers(), next(model.parameters())).device
    if chat:
        asked = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    first = tokenizer.bos_token_id or tokenizer.eos_token_id or 0
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=not chat).input_ids or [first]], device=device)
    attention = model.config._attn_implementation
    devices = [device] if device.type == "cuda" else []
    try:
        model.set_attn_implementation(attention if attention in ("eager", "sdpa") else "sdpa")
        with inference(model), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(seed)
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), use_cache=True, max_new_tokens=max_new_tokens,
                do_sample=temperature > 0, temperature=temperature if temperature > 0 else None,
                top_k=None, top_p=None, pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
                eos_token_id=end_of_turn(tokenizer) or None,
            )  # fmt: skip
    finally:
        model.set_attn_implementation(attention)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

"""NeMo AutoModel, which knows no CPU, imported so that it trains on one: for tests of its driver.

To be imported before any part of it. On a GPU it changes nothing.
"""

import torch

from lacuna.parallel.processes import device_type

if device_type() == "cpu":
    # What it asks of torch.cuda, answered for a CPU. Peaks of memory are not known there.
    torch.cuda.current_device = lambda: 0
    torch.cuda.max_memory_allocated = lambda *_: 0
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    from nemo_automodel._transformers import auto_model

    prepare = auto_model.apply_model_infrastructure

    def prepare_on_cpu(model: torch.nn.Module, **named: object) -> torch.nn.Module:
        return prepare(model, **named | {"device": torch.device("cpu")})

    auto_model.apply_model_infrastructure = prepare_on_cpu

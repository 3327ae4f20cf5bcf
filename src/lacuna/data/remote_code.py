"""Runs code that comes with models only if it is trusted, and chat templates within bounds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from lacuna.config import UserError


def open_with(kind: Any, source: str, trust_remote_code: bool, **settings: Any) -> Any:
    """What transformers' `kind` (AutoTokenizer, ...) makes of a folder or Hub id.

    After it has opened a configuration with code of its own, `AutoModelForCausalLM` can make its
    model like any other. Raises `UserError` where there is such code and it is not trusted;
    transformers would ask on the terminal.
    """
    if kind in (AutoConfig, AutoModelForCausalLM):
        from lacuna.data.fla_models import register_models  # an extension

        register_models(source)
    try:
        found = kind.from_pretrained(source, trust_remote_code=trust_remote_code, **settings)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"{source}: comes with Python code of its own, which only runs if "
            "model.trust_remote_code is set (of lacuna generate and convert: --trust-remote-code): "
            "read it first, or take another model."
        ) from error
    place = (getattr(found, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if (
        kind is AutoConfig
        and place
        and trust_remote_code
        and type(found) not in AutoModelForCausalLM._model_mapping
    ):
        code: Any = get_class_from_dynamic_module(place, source)
        code.register_for_auto_class("AutoModelForCausalLM")
        AutoModelForCausalLM.register(type(found), code, exist_ok=True)
    return found


@contextmanager
def bounded_memory(what: str, mend: str) -> Iterator[None]:
    """A context that raises UserError where `what` takes more than 256 MiB of memory, on Linux.

    The bound holds for other threads of the process as well.
    """
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    import resource  # exists only on Unix

    held = int(sizes.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    within = [limit for limit in (held + 2**28, *before) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(within), before[1]))
    try:
        yield
    except MemoryError as error:
        raise UserError(f"{what} takes more than 256 MiB of memory: {mend}.") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)

"""Where the files of a model and its tokenizer are: as named, or unpacked from a GGUF file."""

import os


def hf_folder(source: str) -> str:
    """`source`, or where that is a .gguf file, a Hugging Face folder of its model and tokenizer.

    The folder is made once and kept with the caches of `datasets`. Raises `UserError` when the file
    cannot be read, or holds what lacuna does not know.
    """
    if not source.endswith(".gguf") or os.path.isdir(source):
        return source
    from lacuna.data.gguf import unpack  # an extension

    return unpack(source)

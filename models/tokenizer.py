"""The tokenizer that lies beside a checkpoint's weights."""

from pathlib import Path
from typing import Any

from models.config import CheckpointError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def load_tokenizer(directory: Path) -> Any | None:
    """A transformers tokenizer, with its chat template, or None where the directory has no tokenizer files.

    Raises CheckpointError, naming the directory, when the files are there and cannot be read.
    """
    if not any((directory / name).is_file() for name in FILES):
        return None
    # Imported here: transformers takes a second, and its AutoTokenizer imports torch where that is installed.
    if (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    try:
        return Tokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as problem:  # the tokenizer library raises bare Exception
        reason = str(problem).strip().split("\n")[0]
        raise CheckpointError(f"the tokenizer in {directory} cannot be read: {reason}") from problem

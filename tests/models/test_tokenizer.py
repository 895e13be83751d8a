"""The tokenizer beside the weights: chat template, stop id, and what happens without one."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from models.config import CheckpointError
from models.tokenizer import load_tokenizer
from replayssm_jax.api import load
from tests.models.tiny import M2, write

TEMPLATE = (
    "{% for m in messages %}w3 {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w4{% endif %}"
)


def write_tokenizer(directory: Path, size: int = 97) -> None:
    """Words w0, w1, ...; w5 ends a text."""
    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "w5",
        "unk_token": "w0",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def test_texts_and_chats_become_token_ids(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer("w7 w9")["input_ids"] == [7, 9]
    chat = [{"role": "user", "content": "w8"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == [3, 8, 4]


def test_the_stop_id_of_the_tokenizer_joins_those_of_the_configs(tmp_path):
    write_tokenizer(tmp_path)
    loaded = load(write(tmp_path, M2, generation={"eos_token_id": [2, 11]}))
    assert loaded.stop_ids == (2, 11, 5)


def test_b16_ids_beyond_the_tokenizer_are_padding(tmp_path):
    write_tokenizer(tmp_path)
    loaded = load(write(tmp_path, M2 | {"vocab_size": 104}))
    assert (loaded.vocab_size, loaded.config.vocab_size) == (97, 104)


def test_a_checkpoint_may_have_no_tokenizer(tmp_path):
    assert load(write(tmp_path, M2)).tokenizer is None


def test_a_broken_tokenizer_is_named_with_its_directory(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"the tokenizer in {tmp_path} cannot be read"):
        load_tokenizer(tmp_path)

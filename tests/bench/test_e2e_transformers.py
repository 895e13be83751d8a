"""Our model with the weights of a transformers model in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from bench.e2e_models import published_json

pytestmark = pytest.mark.long

SMALL = {
    "nano-4b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "vocab_size": 128,
        "expand": 1,
        "chunk_size": 8,
    },
    "qwen3.5-4b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 128,
    },
}


@pytest.mark.parametrize("name", list(SMALL))
def test_logits_are_those_of_the_transformers_model(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from bench.e2e_transformers import random_model, same_weights

    config = published_json(name, 4 if "qwen" in name else 10) | SMALL[name]
    theirs = random_model(config, "cpu")
    ours = same_weights(theirs, config)
    tokens = np.random.default_rng(0).integers(0, 128, (1, 12))
    with torch.inference_mode():
        wanted = theirs(torch.tensor(tokens)).logits[0, -1].float().numpy()
    cache = ours.model.init_cache(1, 32)
    # JAX's own attention promotes bfloat16 to float32 implicitly.
    with jax.numpy_dtype_promotion("standard"):
        logits, _ = rs.prefill(ours.model, jnp.asarray(tokens), jnp.array([12]), cache)
    found = np.asarray(logits, np.float32).reshape(-1)[:128]
    # bfloat16 throughout, in another order.
    assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < 0.03

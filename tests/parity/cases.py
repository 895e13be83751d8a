"""The models, prompts and tolerances of the comparison with transformers, live and golden."""

import jax.numpy as jnp
import numpy as np

import replayssm_jax as rs
from tests.models.tiny import GDN, M2

# Sizes that hide no mistake: groups, GVA ratios 1 to 4, head_dim 80, odd vocabularies, tied and untied heads.
CASES = {
    "nemotron-groups1": M2 | {"n_groups": 1, "vocab_size": 101, "hybrid_override_pattern": "M-*M"},
    "nemotron-groups2-head80": M2 | {"mamba_head_dim": 80, "ssm_state_size": 24, "num_key_value_heads": 1},
    "nemotron-groups4": M2 | {"n_groups": 4, "mamba_num_heads": 8, "use_conv_bias": False},
    "qwen-ratio1": GDN | {"linear_num_key_heads": 4, "vocab_size": 113},
    "qwen-ratio2-tied": GDN | {"tie_word_embeddings": True},
    "qwen-ratio3": GDN | {"linear_num_value_heads": 6, "linear_key_head_dim": 24},
    "qwen-ratio4-head80": GDN | {"linear_num_value_heads": 8, "linear_value_head_dim": 32, "head_dim": 80},
}

LENGTHS = (1, 2, 3, 37)
BUCKET = 40
NEAR_TIE = 1e-3


def tolerance(name: str) -> float:
    """Largest difference of logits of scale 5, float32 (the per-head norm of GDN divides small outputs)."""
    return 5e-5 if name.startswith("nemotron") else 5e-4


def prompts(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    """Random prompts of a case, int64 [length] each."""
    stream = np.random.RandomState(sorted(CASES).index(name))
    return [stream.randint(0, CASES[name]["vocab_size"], length) for length in lengths]


def right_padded(rows: list[np.ndarray], width: int = BUCKET) -> tuple[jnp.ndarray, jnp.ndarray]:
    """int32 tokens [B, width] and lengths [B]; pads hold a token that would do harm if it were read."""
    tokens = np.full((len(rows), width), 1, np.int32)
    for row, text in zip(tokens, rows, strict=True):
        row[: len(text)] = text
    return jnp.asarray(tokens), jnp.asarray([len(text) for text in rows], jnp.int32)


def followed(model, rows: list[np.ndarray], tokens: np.ndarray, replay: rs.ReplayConfig | None) -> np.ndarray:
    """Logits [B, N, V] that the model gives before each of tokens [B, N], fed one by one after prompts."""
    count = tokens.shape[1]
    cache = model.init_cache(batch=len(rows), max_length=BUCKET + count, replay=replay)
    logits, cache = rs.prefill(model, *right_padded(rows), cache)
    steps = [np.asarray(logits)]
    accepted = jnp.ones((len(rows),), jnp.int32)
    for column in np.asarray(tokens, np.int32).T[:-1]:
        logits, cache = rs.step(model, jnp.asarray(column)[:, None], cache)
        cache = rs.commit(cache, accepted)
        steps.append(np.asarray(logits[:, 0]))
    return np.stack(steps, axis=1)


def margin(logits: np.ndarray) -> np.ndarray:
    """Distance of the two largest logits."""
    top = np.sort(logits, axis=-1)
    return top[..., -1] - top[..., -2]

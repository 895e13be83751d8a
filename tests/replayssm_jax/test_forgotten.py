"""Reads and folds that are left out where a head has forgotten its checkpoint: layers with random inputs."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import cache_io, forgotten
from replayssm_jax import flush as flush_module
from replayssm_jax import replay as replay_module
from replayssm_jax.cache import RecurrentSpec, init_cache
from replayssm_jax.config import ReplayConfig
from replayssm_jax.recurrence import RECURRENCES
from replayssm_jax.recurrence.segment import at_slots, token_axis
from replayssm_jax.replay import commit_core, prefill_core, step_core
from tests.replayssm_jax.recurrence.cases import Shape, draw, draw_heads, rms_error, serial, tolerance

LENGTH, WINDOW, STEPS, PROMPTS = 6, 2, 24, (5, 9, 1)
# Of the decays of the heads: some remember, some forget within a few tokens.
RATES = np.array([1.0, 5.0, 15.0, 40.0], np.float32)
TOKENS = max(PROMPTS) + STEPS * WINDOW
SLOW, LONG = pytest.mark.slow, [pytest.mark.slow, pytest.mark.long]


@dataclass
class Layer:
    """A model of one recurrent layer: a token is its own place in a text of random inputs, and the logits are
    the layer's outputs."""

    name: str
    inputs: Any
    reader: Any
    heads: Any

    def __call__(self, tokens, segment, layers):
        inputs, reader = jax.tree.map(
            lambda field: at_slots(field, tokens, token_axis(field)), (self.inputs, self.reader)
        )
        module = RECURRENCES[self.name]
        outputs, layer = replay_module.recur(module, layers[0], inputs, reader, self.heads, segment)
        return outputs.reshape(*tokens.shape, -1), (layer,)

    def logits(self, hidden):
        return hidden


def random_layer(name: str, decays: str, dtype, seed: int = 0) -> tuple[Layer, Shape]:
    rng = np.random.default_rng(seed)
    shape = Shape().for_recurrence(name)
    heads = draw_heads(name, rng, shape, decays)
    inputs, reader = draw(name, rng, shape, TOKENS, heads, decays=decays, dtype=dtype)
    if decays == "mixed" and name == "mamba2":
        heads = replace(heads, a=heads.a * RATES)
    elif decays == "mixed":
        inputs = replace(inputs, log_decay=inputs.log_decay * RATES[None, None, :])
    return Layer(name, inputs, reader, heads), shape


def run(layer: Layer, shape: Shape, skip: str, steps: int = STEPS, halfway=None, **config):
    """Outputs [B, T, H, V] of every step with the places they belong to, the share of heads left out by
    reads, and the last cache. Rows start apart and accept different counts of tokens."""
    spec = RecurrentSpec(
        recurrence=layer.name,
        heads=shape.heads,
        groups=shape.groups,
        head_dim=shape.head_dim,
        d_state=shape.d_state,
        conv_channels=1,
        conv_kernel=2,
    )
    method = ReplayConfig(
        buffer_length=LENGTH, window=WINDOW, implementation="xla", skip_forgotten=skip, **config
    )
    dtype = layer.reader.dtype
    cache = init_cache((spec,), (layer.heads,), shape.batch, TOKENS, replay=method, dtype=dtype)
    skipped = []

    def without(state, gone):
        jax.debug.callback(lambda share: skipped.append(float(share)), jnp.mean(gone, dtype=jnp.float32))
        return forgotten.without(state, gone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "without", without)
        step = jax.jit(lambda tokens, cache: step_core(layer, tokens, cache)[::2])
        prefill = jax.jit(lambda *given: prefill_core(layer, *given)[::2])
        prompt = np.tile(np.arange(max(PROMPTS), dtype=np.int32), (shape.batch, 1))
        _, cache = prefill(jnp.asarray(prompt), jnp.asarray(PROMPTS, jnp.int32), cache)
        rng = np.random.default_rng(1)
        places, outputs = [], []
        for index in range(steps):
            if halfway is not None and index == steps // 2:
                cache = halfway(cache)
            place = np.asarray(cache.position)[:, None] + np.arange(WINDOW)
            logits, cache = step(jnp.asarray(place, jnp.int32), cache)
            accepted = rng.integers(0, WINDOW + 1, shape.batch).astype(np.int32)
            cache = jax.jit(commit_core)(cache, accepted)
            places.append(place)
            outputs.append(np.asarray(logits).reshape(*place.shape, shape.heads, shape.head_dim))
        jax.effects_barrier()
    return np.stack(places), np.stack(outputs), np.mean(skipped or [0.0]), cache


def true_outputs(layer: Layer, shape: Shape, places: np.ndarray) -> np.ndarray:
    """Of the serial float64 loop, at the places of every step."""
    state = np.zeros((shape.batch, shape.heads, shape.head_dim, shape.d_state))
    outputs, _ = serial(layer.name, state, layer.inputs, layer.reader, layer.heads)
    rows = np.arange(shape.batch)[None, :, None]
    return outputs[rows, places]


def check_exact(layer: Layer, shape: Shape, **config) -> None:
    places, plain, _, cache = run(layer, shape, "off", **config)
    again, outputs, share, skipping = run(layer, shape, "exact", **config)
    assert share > 0.1
    np.testing.assert_array_equal(places, again)
    np.testing.assert_array_equal(outputs, plain)
    stored, wanted = (jax.tree.leaves(end.layers[0].checkpoint) for end in (skipping, cache))
    for mine, theirs in zip(stored, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mamba2", {}),
        pytest.param("gated_delta", {}, marks=LONG),
        pytest.param("gated_delta", {"recurrence": "fp16", "read": "nvfp4"}, marks=LONG),
    ],
)
def test_exact_skips_keep_every_bit(name, config):
    layer, shape = random_layer(name, "spiky", jnp.float32)
    check_exact(layer, shape, **config)


def check_bounded(layer: Layer, shape: Shape, target: float) -> float:
    places, outputs, share, _ = run(layer, shape, "bounded")
    assert rms_error(outputs.swapaxes(0, 1), true_outputs(layer, shape, places).swapaxes(0, 1)) < target
    return share


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gated_delta", "bfloat16"),
        pytest.param("mamba2", "float32", marks=LONG),
        pytest.param("mamba2", "bfloat16", marks=LONG),
        pytest.param("gated_delta", "float32", marks=LONG),
    ],
)
def test_bounded_skips_keep_within_their_bound(name, dtype):
    layer, shape = random_layer(name, "mixed", jnp.dtype(dtype))
    target = tolerance(TOKENS) if dtype == "float32" else 2.0**-9
    assert check_bounded(layer, shape, target) > 0.05


@pytest.mark.parametrize(
    ("threshold", "value"),
    [
        ("LEAST_READ", {2: 0.5, 4: 2.0**-9}),
        pytest.param("LOG_ZERO", -1.0, marks=SLOW),
        pytest.param("LEAST_FOLD", 2.0**5, marks=SLOW),
    ],
)
def test_wrong_thresholds_are_seen(threshold, value, monkeypatch):
    monkeypatch.setattr(forgotten, threshold, value)
    layer, shape = random_layer("mamba2", "mixed", jnp.float32)
    with pytest.raises(AssertionError):
        check_bounded(layer, shape, tolerance(TOKENS))


def silenced(name: str, dtype) -> tuple[Layer, Shape, int]:
    """A layer whose heads forget their checkpoint within a window, but not down to 0; the last head adds
    nothing to its first row. And that head."""
    layer, shape = random_layer(name, "mixed", dtype)
    rates = jnp.full(shape.heads, -8.0)
    if name == "mamba2":
        heads, decaying = replace(layer.heads, a=rates), {"dt": jnp.ones_like(layer.inputs.dt)}
    else:
        heads, decaying = layer.heads, {"log_decay": jnp.broadcast_to(rates, layer.inputs.beta.shape)}
    field = "x" if name == "mamba2" else "v"
    values = getattr(layer.inputs, field)
    values = values.at[:, -1, :, -shape.head_dim].set(0)
    # Prompts fill that row too.
    prompted = np.arange(TOKENS) < np.array(PROMPTS)[:, None]
    values = jnp.where(prompted[:, None, :, None], getattr(layer.inputs, field), values)
    layer = replace(layer, inputs=replace(layer.inputs, **decaying, **{field: values}), heads=heads)
    return layer, shape, shape.heads - 1


@pytest.mark.parametrize(
    ("name", "dtype"), [("mamba2", "float32"), pytest.param("gated_delta", "bfloat16", marks=SLOW)]
)
def test_a_pure_write_loses_less_than_a_rounding_of_every_row(name, dtype, monkeypatch):
    layer, shape, silent = silenced(name, jnp.dtype(dtype))
    left_out = []

    def without(state, gone):
        jax.debug.callback(lambda heads: left_out.append(np.asarray(heads)), gone)
        return forgotten.without(state, gone)

    # Two rows flush their prompts' state in so many steps.
    *_, off = run(layer, shape, "off", steps=5)
    monkeypatch.setattr(flush_module, "without", without)
    *_, bounded = run(layer, shape, "bounded", steps=5)
    heads = np.any(left_out, axis=(0, 1))
    assert heads[:silent].all() and not heads[silent]
    kept, wanted = (np.asarray(cache.layers[0].checkpoint, np.float64) for cache in (bounded, off))
    lost, rows = (np.linalg.norm(x, axis=-1) for x in (kept - wanted, wanted))
    assert (np.asarray(off.start) > np.array(PROMPTS)).sum() == 2 and (rows > 0).all()
    assert (lost <= 2.0**-24 * rows).all()


@SLOW
def test_what_is_known_of_a_checkpoint_moves_with_its_row(tmp_path):
    layer, shape = random_layer("gated_delta", "mixed", jnp.bfloat16)

    def there_and_back(cache):
        rs.save_cache(cache, tmp_path / "cache")
        cache = rs.restore_cache(tmp_path / "cache")
        spoiled = replace(cache.layers[0].reach, largest=jnp.full_like(cache.layers[0].reach.largest, 1e6))
        other = replace(cache, layers=(replace(cache.layers[0], reach=spoiled),))
        return rs.insert(other, rs.select(cache, [2, 0, 1]), np.array([2, 0, 1]))

    _, plain, share, cache = run(layer, shape, "bounded")
    _, outputs, same, moved = run(layer, shape, "bounded", halfway=there_and_back)
    np.testing.assert_array_equal(outputs, plain)
    assert share == same
    # Bounds of the largest rows hold, and cleared rows know nothing.
    largest = np.linalg.norm(np.asarray(moved.layers[0].checkpoint), axis=-1).max(axis=-1)
    assert (np.asarray(moved.layers[0].reach.largest) >= largest * (1 - 1e-5)).all()
    cleared = rs.reset(cache, np.array([1])).layers[0].reach
    assert not np.asarray(cleared.largest)[1].any() and np.asarray(cleared.largest)[0].all()


def test_a_cache_saved_before_rows_were_bounded_knows_nothing_of_them(tmp_path, monkeypatch):
    spec = RecurrentSpec(
        recurrence="gated_delta", heads=2, groups=2, head_dim=4, d_state=4, conv_channels=1, conv_kernel=2
    )
    method = ReplayConfig(implementation="xla", skip_forgotten="bounded")
    cache = init_cache((spec,), (RECURRENCES["gated_delta"].Heads(),), 1, 8, replay=method, dtype=jnp.float32)
    known = jax.tree.map(jnp.ones_like, cache.layers[0].reach)
    cache = replace(cache, layers=(replace(cache.layers[0], reach=known),))
    arrays = cache_io._layer_arrays
    monkeypatch.setattr(
        cache_io,
        "_layer_arrays",
        lambda layer: {name: x for name, x in arrays(layer).items() if name != "reach.least"},
    )
    rs.save_cache(cache, tmp_path / "cache")
    reach = rs.restore_cache(tmp_path / "cache").layers[0].reach
    assert np.asarray(reach.added).all() and not np.asarray(reach.least).any()


def test_a_way_of_skipping_is_checked():
    spec = RecurrentSpec(
        recurrence="kimi_delta", heads=2, groups=2, head_dim=4, d_state=4, conv_channels=1, conv_kernel=2
    )
    with pytest.raises(ValueError, match="needs one decay a head, which kimi_delta has not"):
        init_cache((spec,), (None,), 1, 8, replay=ReplayConfig(skip_forgotten="exact"), dtype=jnp.float32)
    with pytest.raises(ValueError, match='"off", "exact" or "bounded", got \'some\''):
        ReplayConfig(skip_forgotten="some")

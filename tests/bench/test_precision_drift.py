"""Windows with simulated formats are what single steps with the real ones give."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.drift_heads import HeadSums, MeasuredLayer, head_record, measure_windows, measured_layers
from bench.drift_layers import (
    CONFIGURATIONS,
    SimulatedLayer,
    decode_window,
    simulated_layers,
    window_segment,
)
from bench.drift_report import by_task, headline, inside, interval, slope
from bench.drift_streams import cells
from bench.drift_tasks import INTERVALS, TASKS, answers, task_stream
from replayssm_jax import materialize, prefill
from replayssm_jax.cache import RecurrentLayer
from replayssm_jax.flush import read_source, rewrite
from replayssm_jax.precision import decode, encode, zeros
from replayssm_jax.recurrence import RECURRENCES
from replayssm_jax.replay import commit_core, step_core
from tests import oracles
from tests.replayssm_jax.recurrence.cases import Shape, draw, draw_heads
from tests.tiny_models import hot_model, random_tokens

SEPARATE = next(item for item in CONFIGURATIONS if item.name == "NVFP4 read, FP32")
SHARED = next(item for item in CONFIGURATIONS if item.name == "shared NVFP4, nearest")
TEXTS = 2


@functools.partial(jax.jit, static_argnames=("configurations", "length"))
def in_windows(model, tokens, seeds, configurations, length):
    """Logits [configuration, text, token, vocabulary]."""
    windows = jnp.moveaxis(tokens.reshape(TEXTS, -1, length), 1, 0)
    layers = simulated_layers(model, TEXTS, tokens.shape[1], configurations, seeds)

    def body(carry, window):
        layers, position = carry
        logits, layers = decode_window(model, layers, position, window)
        return (layers, position + length), logits

    _, logits = jax.lax.scan(body, (layers, jnp.int32(0)), windows)
    logits = jnp.moveaxis(logits, 0, 1)
    return logits.reshape(len(configurations), TEXTS, tokens.shape[1], -1)


@jax.jit
def in_steps(model, tokens, cache):
    """Logits [text, token, vocabulary] of single steps."""

    def body(cache, token):
        logits, _, cache = step_core(model, token[:, None], cache)
        return commit_core(cache, jnp.ones((TEXTS,), jnp.int32)), logits[:, 0]

    return jnp.moveaxis(jax.lax.scan(body, cache, tokens.T)[1], 0, 1)


def distances(family, configurations, tokens, length, layers):
    """Largest logit difference of every token over the RMS of the logits, [token] by configuration; and how
    far the windows' logits lie from those of the first configuration."""
    model = hot_model(family, layers=layers)
    texts = jnp.asarray(random_tokens(TEXTS, tokens))
    caches = [model.init_cache(TEXTS, tokens, item.replay(length), seed=5) for item in configurations]
    ours = in_windows(model, texts, caches[0].seed, configurations, length)
    differences = {}
    for item, cache, logits in zip(configurations, caches, ours, strict=True):
        wanted = in_steps(model, texts, cache)
        scale = float(jnp.sqrt(jnp.mean(jnp.square(wanted))))
        away = np.asarray(jnp.max(jnp.abs(logits - ours[0]), axis=(0, 2))) / scale
        differences[item] = np.asarray(jnp.max(jnp.abs(logits - wanted), axis=(0, 2))) / scale, away
    return differences


def check(differences, length):
    """Two programs differ by float32 rounding, some 1e-6 of the logits.

    Now and then that tips the rounding of one state element to its neighbour: one in 1e6 for NVFP4, where
    codes lie far apart, one in 2,000 for BF16. What follows is of the kind of the format's own distance from
    FP32, and smaller, as one element among hundreds. Before the first tip, in the first windows, logits
    agree; reading from the wrong place or with other random words would show there at full size.
    """
    for item, (difference, away) in differences.items():
        own = float(np.median(away))
        start = float(np.max(difference[: 2 * length]))
        if item == CONFIGURATIONS[0]:
            assert np.max(difference) < 1e-4
            continue
        assert own > 1e-4, (item, own)
        assert start < max(1e-4, own / 20), (item, start, own)
        assert np.mean(difference) < own / 4, (item, np.mean(difference), own)


def test_windows_are_single_steps():
    check(distances("gated_delta", (CONFIGURATIONS[0], SEPARATE), 64, 8, layers=1), 8)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("mamba2", 3), ("gated_delta", 2)])
def test_windows_are_single_steps_for_every_configuration(family, layers):
    check(distances(family, CONFIGURATIONS, 1000, 8, layers), 8)


def test_simulated_formats_are_the_stored_ones():
    """A flush writes the same bits: checkpoint and copy of every configuration, by seed, layer and start."""
    rng = np.random.default_rng(3)
    shape, count = (2, 3, 4, 32), len(CONFIGURATIONS)
    states = rng.normal(size=(count, *shape)) * np.exp(4 * rng.normal(size=(count, *shape)))
    states = jnp.asarray(states, jnp.float32)
    seeds, index, length = jnp.asarray([11, 12], jnp.uint32), 5, 8
    segment = window_segment(jnp.int32(40), count * 2, length)
    ours = SimulatedLayer(
        checkpoint=jnp.zeros((count * 2, *shape[1:]), jnp.float32),
        conv=jnp.zeros((0,), jnp.float32),
        seed=jnp.tile(seeds, count),
        configurations=CONFIGURATIONS,
        index=index,
    ).rewritten(states.reshape(-1, *shape[1:]), segment)
    checkpoints = ours.checkpoint.reshape(states.shape)
    copies = ours.read().reshape(states.shape)
    start = jnp.full((2,), 48, jnp.int32)
    flushed = replace(window_segment(jnp.int32(48), 2, 1), seed=seeds)
    for item, state, checkpoint, copy in zip(CONFIGURATIONS, states, checkpoints, copies, strict=True):
        layer = RecurrentLayer(
            checkpoint=zeros(shape, item.recurrence),
            ring=None,
            conv=jnp.zeros((2, 1, 1), jnp.float32),
            heads=None,
            recurrence="mamba2",
            copy=None if item.read == item.recurrence else zeros(shape, item.read),
            index=index,
        )
        seeded = flushed if item.rounding == "stochastic" else replace(flushed, seed=None)
        stored = rewrite(layer, state, jnp.ones((2,), bool), start, seeded)
        assert np.asarray(decode(stored.checkpoint)).tobytes() == np.asarray(checkpoint).tobytes(), item
        read = read_source(stored, jnp.zeros((2,), bool))
        assert np.asarray(read).tobytes() == np.asarray(copy).tobytes(), item


def test_cells_count_whole_answers():
    text = b"filler text without end " * 40
    body, kinds = task_stream(text, 6000, seed=4)
    spans = list(answers(kinds))
    right = np.zeros((2, 1, 5999), bool)
    right[1] = True
    wrong = [span for span in spans if span[0] == 3][0]
    right[1, 0, wrong[1]] = False  # the second of four symbols
    counts = cells(kinds[None], right)
    assert counts.shape == (2, len(TASKS), len(INTERVALS), 2) and len(TASKS) * len(INTERVALS) == 48
    asked = np.bincount([task for task, _, _ in spans], minlength=len(TASKS))
    np.testing.assert_array_equal(counts[..., 1].sum(axis=-1), np.stack([asked, asked]))
    assert counts[0, ..., 0].sum() == 0
    np.testing.assert_array_equal(counts[1, ..., 0].sum(axis=-1), asked - (np.arange(len(TASKS)) == 3))
    assert counts[:, :, 2:, 1].sum() == 0 < counts[:, :, 1, 1].sum()


@pytest.mark.parametrize("shrink", [1, 4])
def test_answers_follow_from_what_the_stream_states(shrink):
    """An independent reader of the stream, mention by mention, finds every answer and its distance."""
    body, kinds = task_stream(b"some other words, " * 50, 40000, seed=6, shrink=shrink)
    data, values, found, delays = body.tobytes(), {}, 0, []
    spans = {first: (task, last) for task, first, last in answers(kinds)}
    for place in (place for place, byte in enumerate(data[:-8]) if byte < 9):
        register, rest = data[place + 1 : place + 2], place + 2
        if data[place] % 2:
            values[register] = data[rest : rest + (4 if data[place] == 3 else 1)], rest
            continue
        value, mentioned = values[register]
        values[register] = value, place
        if data[place] == 6:
            value, rest = b"%d" % ((int(value) + int(data[rest : rest + 1])) % 10), rest + 1
        if rest in spans:
            task, last = spans[rest]
            assert data[rest:last] == value
            # Others that are due at the same time come first.
            delays.append((place - mentioned) * shrink - TASKS[task].farthest)
            assert place - mentioned >= TASKS[task].nearest // shrink - 1
            found += 1
    assert found >= len(spans) - 4 > 2000
    assert max(delays) <= 100 * shrink
    text = np.frombuffer(data, np.uint8)[kinds == 0]
    assert text.size > 10000 and b"some other words" in text.tobytes()


@pytest.mark.slow
def test_errors_by_head_come_from_the_formats_alone():
    """Against a loop over windows that keeps every state in float64 beside the stored one."""
    model = hot_model("gated_delta", layers=1)
    length, chosen = 8, (CONFIGURATIONS[0], SHARED, SEPARATE)
    tokens = jnp.asarray(random_tokens(TEXTS, 64))
    windows = jnp.moveaxis(tokens.reshape(TEXTS, -1, length), 1, 0)
    seeds = jnp.asarray([1, 2], jnp.uint32)
    layers = measured_layers(model, TEXTS, 64, chosen, seeds, (0, 32))
    (layers, position), _ = measure_windows(model, layers, jnp.int32(0), windows)
    record = head_record(layers, chosen, length)
    assert int(position) == 64
    # The FP32 state of a plain cache before every window, and the states that rounding makes of it.
    eager, expected = model.init_cache(TEXTS, 64, chosen[0].replay(length)), []
    states = []
    for window in windows:
        states.append(np.asarray(materialize(eager)[0]))
        _, eager = prefill(model, window, np.full(TEXTS, length, np.int32), eager)
    late = range(4, 8)
    copies = [np.asarray(decode(encode(jnp.asarray(states[w]), "nvfp4"))) for w in late]
    exact = np.stack([states[w] for w in late]).astype(np.float64)
    error = np.sum((np.stack(copies) - exact) ** 2, axis=(0, 1, 3, 4))
    expected = error / np.sum(exact**2, axis=(0, 1, 3, 4))
    np.testing.assert_allclose(record["errors"][SEPARATE.name][0], expected, rtol=1e-3)
    assert record["errors"]["FP32"] == [[0.0] * len(expected)]
    assert np.all(np.asarray(record["errors"][SHARED.name][0]) > expected)
    assert len(record["growth"]["FP32"]) == 2
    # A first rounding is predicted as it is; then what the decay leaves of it is added.
    assert np.all(np.asarray(record["predicted"][0]) >= expected * (1 - 1e-3))


def test_report_counts_cells_inside_the_interval():
    assert interval(0, 50)[0] == 0.0 and interval(50, 50)[1] == 1.0
    low, high = interval(40, 50)  # 0.67 to 0.888 by published tables of Wilson's interval
    assert abs(low - 0.6696) < 1e-3 and abs(high - 0.8876) < 1e-3
    same = {
        "model": "m",
        "buffer_length": 16,
        "tokens": 8192,
        "edges": [0, 1024, 2048, 4096],
        "texts": ["a", "b"],
    }
    fields = {"kl": [[0.1, 0.2, 0.4, 0.8]] * 2, "agreement": [[1.0] * 4] * 2, "bits": [[2.0] * 4] * 2}
    truth = same | fields | {"configuration": "FP32", "cells": [[[40, 50], [10, 50]]]}
    other = same | fields | {"configuration": "shared NVFP4, nearest", "cells": [[[38, 50], [30, 50]]]}
    assert inside([truth, other], other) == (1, 2)
    assert inside([truth, other], other, most=5) == (2, 2)  # 1 of 5: 0.036 to 0.624
    mean, error = slope(other)
    assert abs(mean - np.log(2.0)) < 1e-6 and error < 1e-6
    assert "1 of 2" in headline([truth, other])
    assert "| 50.0 % | 68.0 % |" in by_task([truth, other])


@pytest.mark.slow
def test_predicted_errors_follow_the_measured_decay():
    """Mamba-2, one layer without a model: errors of single roundings, carried on by each window's decay."""
    rng, length, windows = np.random.default_rng(9), 4, 6
    sizes = Shape(batch=2, heads=2, groups=1, head_dim=4, d_state=32)
    heads = draw_heads("mamba2", rng, sizes)
    inputs, reader = draw("mamba2", rng, sizes, length * windows, heads, decays="slow")
    rows, shape = sizes.batch, (sizes.heads, sizes.head_dim, sizes.d_state)
    states = SimulatedLayer(
        checkpoint=jnp.zeros((3 * rows, *shape), jnp.float32),
        conv=jnp.zeros((0,), jnp.float32),
        seed=jnp.zeros((3 * rows,), jnp.uint32),
        configurations=(CONFIGURATIONS[0], SHARED, SEPARATE),
        index=0,
    )
    layer = MeasuredLayer(
        states=states,
        conv=jnp.zeros((rows, 0, 0), jnp.float32),
        sums=HeadSums.zeros(1, 3, sizes.heads),
        variance=jnp.zeros((rows, sizes.heads), jnp.float32),
        edges=(0,),
    )
    advance = jax.jit(lambda layer, *given: layer.recur(RECURRENCES["mamba2"], *given[:-1], heads, given[-1]))
    exact = np.zeros((rows, *shape))
    variance, predicted, separate = np.zeros((rows, sizes.heads)), 0.0, 0.0
    for window in range(windows):
        copy = np.asarray(decode(encode(jnp.asarray(exact, jnp.float32), "nvfp4")))
        error = np.sum((copy - exact) ** 2, axis=(2, 3))
        variance, separate = variance + error, separate + error.sum(axis=0)
        predicted += variance.sum(axis=0)
        span = slice(window * length, (window + 1) * length)
        given = jax.tree.map(
            lambda f, span=span: f[:, span] if f.ndim == 3 else f[:, :, span], (inputs, reader)
        )
        _, layer = advance(layer, *given, window_segment(jnp.int32(span.start), rows, length))
        _, exact = oracles.mamba2(
            exact, *jax.tree.leaves(given[0]), given[1], np.asarray(heads.a), np.asarray(heads.d)
        )
        decay = np.exp(np.asarray(heads.a) * np.asarray(given[0].dt, np.float64).sum(axis=1))
        variance = variance * decay**2
    np.testing.assert_allclose(layer.sums.predicted[0], predicted, rtol=1e-3)
    np.testing.assert_allclose(layer.sums.error[0, 2], separate, rtol=1e-3)

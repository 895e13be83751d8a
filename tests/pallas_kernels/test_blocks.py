"""Programs of a warp, its lanes run in NumPy, against the serial float64 loop."""

import functools

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import adjoint, gated_delta, mamba2
from pallas_kernels.blocks import BLOCK, Warp
from pallas_kernels.new_tokens import NewTokens, write_single_output
from pallas_kernels.pipeline import Geometry

BFLOAT16 = ml_dtypes.bfloat16
KERNELS = {"mamba2": mamba2.KERNELS, "gated_delta": gated_delta.KERNELS}


class NumpyLanes:
    """The operations of `Lanes` on arrays of 32 lanes."""

    def __init__(self, warp):
        self.lane = np.arange(32)
        self.warp = np.full(32, warp)

    equal = staticmethod(np.equal)
    exp = staticmethod(np.exp)
    lows = staticmethod(lambda a, b: a & 0xFFFF | b << 16)
    highs = staticmethod(lambda a, b: a >> 16 & 0xFFFF | b & ~0xFFFF)

    def select(self, condition, yes, no):
        return np.where(condition, yes, np.asarray(no, np.asarray(yes).dtype))

    def loop(self, count, body, carry):
        for i in range(int(np.max(count))):
            carry = body(np.full(32, i), carry)
        return carry

    def fma(self, a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def shuffle(self, x, lane):
        return x[np.broadcast_to(lane, 32) % 32]

    def quad_sum(self, x):
        return x.reshape(8, 4).sum(axis=1, dtype=np.float32).repeat(4)

    def rows(self, ref):
        return len(ref)

    def real(self, ref, row, column):
        return ref[row, column].astype(np.float32)

    def reals(self, ref, row, column):
        return [self.real(ref, row, column + i) for i in range(4)]

    def store(self, ref, row, column, values, condition):
        for i, value in enumerate(values):
            ref[row[condition], (column + i)[condition]] = value[condition]

    def sync(self):
        pass

    def pair(self, ref, row, column, at=0):
        column = column + at
        assert not np.any(column % 2)
        bits = ref.view(np.uint16).astype(np.int64)
        return bits[row, column] | bits[row, column + 1] << 16

    def quad(self, ref, row, column, at=0):
        assert not np.any((column + at) % 4)
        return self.pair(ref, row, column, at), self.pair(ref, row, column, at + 2)

    def pack(self, low, high):
        halves = [x.astype(BFLOAT16).view(np.uint16).astype(np.int64) for x in (low, high)]
        return halves[0] | halves[1] << 16

    def low(self, packed):
        return (packed & 0xFFFF).astype(np.uint16).view(BFLOAT16).astype(np.float32)

    def high(self, packed):
        return self.low(packed >> 16)

    def product(self, total, left, right):
        g, q = self.lane // 4, self.lane % 4
        a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, word in enumerate(left):
            a[g + 8 * (i % 2), 2 * q + 8 * (i // 2)] = self.low(word)
            a[g + 8 * (i % 2), 2 * q + 8 * (i // 2) + 1] = self.high(word)
        for i, word in enumerate(right):
            b[2 * q + 8 * i, g], b[2 * q + 8 * i + 1, g] = self.low(word), self.high(word)
        for i, x in enumerate(total):
            c[g + 8 * (i // 2), 2 * q + i % 2] = x
        d = (c + a @ b).astype(np.float32)
        return [d[g + 8 * (i // 2), 2 * q + i % 2] for i in range(4)]


def serial(name, state, tokens, head, a):
    """The recurrence in float64 from the committed tokens, oldest first."""
    state = state.astype(np.float64)
    for value, key, *scalars in tokens:
        value, key = value.astype(np.float64), key.astype(np.float64)
        first, *rest = (x.astype(np.float64)[head][:, None] for x in scalars)
        if name == "mamba2":
            state = np.exp(first * a) * state + first * value[:, None] * key
        else:
            state = np.exp(first) * state
            state = state + rest[0] * (value - state @ key)[:, None] * key
    return state


def new_tokens(name, warp, call, target, head_dim, a, d, part_count=3):
    """The tokens of a call as the kernel gives them to a warp."""
    rule = KERNELS[name].token_rule
    lanes, head = NumpyLanes(warp), np.full(32, 16 * warp // head_dim)

    def factors(scalars):
        return rule.factors(lanes, (np.float32(a),), scalars)

    skip = None if rule.skip is None else np.float32(d)
    options = {"reads_key": rule.reads_key, "part_count": part_count}
    return NewTokens(lanes, call, target, head, factors, skip, **options)


def fold(name, state, ring, begin, length, head_dim, a, call=None, target=None, part_count=3):
    """The tile after all blocks, warp by warp as the kernel runs them; with `call` also the outputs of its
    tokens."""
    columns = state.shape[1]
    result = np.empty_like(state)
    for warp in range(4):
        rows = [16 * warp + np.arange(32) // 4 + 8 * half for half in range(2)]
        at = [[4 * (np.arange(32) % 4) + 16 * p + i for i in range(4)] for p in range(columns // 16)]
        lanes = [[[state[row, column] for column in four] for row in rows] for four in at]
        for first in range(0, max(length, 1) if call else length, BLOCK):
            new = (
                () if call is None else (new_tokens(name, warp, call, target, head_dim, a, 0.0, part_count),)
            )
            lanes = KERNELS[name].token_rule.block(
                Warp(
                    NumpyLanes(warp),
                    lanes,
                    (ring[0], ring[1], ring[2:]),
                    len(ring[0]),
                    (np.full(32, begin), np.full(32, first), np.full(32, length)),
                    np.full(32, 16 * warp // head_dim),
                    (np.float32(a),) * 2,
                    part_count,
                ),
                *new,
            )
        for four, halves in zip(at, lanes, strict=True):
            for row, values in zip(rows, halves, strict=True):
                for column, value in zip(four, values, strict=True):
                    result[row, column] = value
    return result


@pytest.mark.parametrize(
    ("length", "slots", "begin"), [(1, 8, 7), (5, 8, 6), (13, 24, 19), (16, 24, 11), (27, 40, 33)]
)
@pytest.mark.parametrize("head_dim", [64, 16])
@pytest.mark.parametrize("name", ["mamba2", "gated_delta"])
def test_block_fold_is_the_float64_loop(name, head_dim, length, slots, begin):
    rng = np.random.default_rng(length)
    heads = 64 // head_dim
    keys = rng.standard_normal((slots, 64))
    if name == "gated_delta":
        keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    scalars = [rng.uniform(0.05, 1.0, (slots, heads)).astype(np.float32)]
    if name == "gated_delta":
        scalars = [-scalars[0], rng.uniform(0.05, 1.0, (slots, heads)).astype(np.float32)]
    # A spike: everything before it vanishes, and decays after it must stay exact.
    scalars[0][(begin + length // 2) % slots] *= 200.0
    ring = (
        rng.standard_normal((slots, 64)).astype(BFLOAT16),
        keys.astype(BFLOAT16),
        *scalars,
    )
    state = rng.standard_normal((64, 64)).astype(np.float32)
    tokens = [[x[(begin + j) % slots] for x in ring] for j in range(length)]
    wanted = serial(name, state, tokens, np.arange(64) // head_dim, -1.5)
    error = fold(name, state, ring, begin, length, head_dim, -1.5) - wanted
    assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < 5e-7


@pytest.mark.parametrize(
    ("tokens", "heads", "length", "slots", "begin"),
    [(1, 4, 0, 8, 3), (1, 3, 15, 24, 19), (4, 4, 9, 24, 16), (2, 1, 30, 40, 33), (8, 4, 15, 24, 23)],
)
def test_adjoint_blocks_are_the_float64_loop(tokens, heads, length, slots, begin):
    rng = np.random.default_rng(tokens)
    geo = Geometry(1, 1, heads, 64, 64, slots, tokens)
    offset = 2
    total = length + tokens

    def unit(count):
        x = rng.standard_normal((count, 64))
        return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(BFLOAT16)

    keys, queries = unit(geo.slots), unit(tokens)
    values = rng.standard_normal((geo.slots, heads, 64)).astype(BFLOAT16)
    decays = -rng.uniform(0.01, 0.8, (geo.slots, geo.head_slots)).astype(np.float32)
    rates = rng.uniform(0.05, 1.0, (geo.slots, geo.head_slots)).astype(np.float32)
    at = [(begin + j) % slots if j < length else slots + j - length for j in range(total)]
    if tokens > 2:
        decays[at[total // 3]] = -200.0
    weights = np.full((tokens, heads, geo.slots), np.nan, np.float32)
    readers = np.full((tokens, heads, 64), np.nan, np.float32)
    refs = (keys, queries, decays, rates, weights.reshape(-1, geo.slots), readers.reshape(-1, 64))
    last = (total - 1) // BLOCK
    for first in range(last * BLOCK, -1, -BLOCK):
        newest = first == last * BLOCK
        for warp in range(-(-tokens * heads // BLOCK) * adjoint.warp_parts(geo, newest=newest)):
            cursors = (np.full(32, x) for x in (begin, first, length, offset))
            adjoint.adjoint_block(NumpyLanes(warp), geo, refs, *cursors, newest=newest)

    state = rng.standard_normal((heads, 64, 64))
    for h in range(heads):
        entries = [(values[i, h], keys[i], decays[i], rates[i]) for i in at]
        for t in range(tokens):
            seen = entries[: length + t + 1]
            final = serial("gated_delta", state[h], seen, np.full(64, offset + h), None)
            wanted = final @ queries[t].astype(np.float64)
            y = state[h] @ readers[t, h].astype(np.float64)
            y += weights[t, h].astype(np.float64) @ values[:, h].astype(np.float64)
            assert np.sqrt(np.mean((y - wanted) ** 2) / np.mean(wanted**2)) < 1e-6
    live = np.isin(np.arange(geo.slots), at)
    assert not np.any(weights[..., ~live])


def random_call(name, tokens, heads):
    """Values, probes and scalars of a call, with a spike of decay among them."""
    rng = np.random.default_rng(tokens)
    probes = rng.standard_normal((2 * tokens, 64))
    scalars = [rng.uniform(0.05, 1.0, (8, heads)).astype(np.float32)]
    if name == "gated_delta":
        probes = probes / np.linalg.norm(probes, axis=1, keepdims=True)
        scalars = [-scalars[0], rng.uniform(0.05, 1.0, (8, heads)).astype(np.float32)]
    scalars[0][tokens // 2] *= 200.0
    return rng.standard_normal((tokens, 64)).astype(BFLOAT16), probes.astype(BFLOAT16), tuple(scalars)


def serial_outputs(name, state, call, head_dim, a, d):
    """Outputs [T, 64] of a call's tokens after a state, in float64."""
    values, probes, scalars = call
    tokens = len(values)
    outputs = np.empty((tokens, 64))
    for t in range(tokens):
        entries = [(values[j], probes[j], *(s[j] for s in scalars)) for j in range(t + 1)]
        moved = serial(name, state, entries, np.arange(64) // head_dim, a)
        outputs[t] = moved @ probes[tokens + t].astype(np.float64)
        if name == "mamba2":
            outputs[t] += d * values[t].astype(np.float64)
    return outputs


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 16])
@pytest.mark.parametrize("name", ["mamba2", "gated_delta"])
def test_outputs_of_new_tokens_are_the_float64_loop(name, head_dim, tokens):
    call = random_call(name, tokens, 64 // head_dim)
    state = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    outputs = np.full((tokens, 64), np.nan, np.float32)
    at = [[4 * (np.arange(32) % 4) + 16 * p + i for i in range(4)] for p in range(4)]
    for warp in range(4):
        rows = [16 * warp + np.arange(32) // 4 + 8 * half for half in range(2)]
        new = new_tokens(name, warp, call, outputs, head_dim, -1.5, 0.75)
        for p, four in enumerate(at):
            new.project(p, new.left(*([state[row, column] for column in four] for row in rows)))
        new.store(new.projections())
    wanted = serial_outputs(name, state, call, head_dim, -1.5, 0.75)
    assert np.sqrt(np.mean((outputs - wanted) ** 2) / np.mean(wanted**2)) < 1e-6


@pytest.mark.parametrize("head_dim", [64, 16])
def test_a_single_output_by_sums_is_the_float64_loop(head_dim):
    call = random_call("mamba2", 1, 64 // head_dim)
    state = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    outputs, columns = np.full((1, 64), np.nan, np.float32), np.arange(32) % 4 * 4
    for warp in range(4):
        lanes, rows = NumpyLanes(warp), [16 * warp + np.arange(32) // 4 + 8 * half for half in range(2)]
        tile = [[[state[row, columns + 16 * p + i] for i in range(4)] for row in rows] for p in range(4)]
        head = np.full(32, 16 * warp // head_dim)
        factors = functools.partial(KERNELS["mamba2"].token_rule.factors, lanes, (np.float32(-1.5),))
        write_single_output(lanes, tile, call, outputs, head, factors, np.float32(0.75))
    wanted = serial_outputs("mamba2", state, call, head_dim, -1.5, 0.75)
    assert np.sqrt(np.mean((outputs - wanted) ** 2) / np.mean(wanted**2)) < 1e-6


@pytest.mark.parametrize(
    ("tokens", "length", "begin", "stored", "part_count"),
    [
        (1, 0, 5, np.float32, 3),
        (4, 7, 20, np.float32, 3),
        (6, 16, 11, np.float32, 3),
        (8, 21, 3, np.float32, 3),
        (3, 13, 9, BFLOAT16, 1),
        (5, 16, 19, np.float16, 2),
    ],
)
def test_a_fold_that_makes_the_outputs_is_the_float64_loop(tokens, length, begin, stored, part_count):
    rng = np.random.default_rng(length)
    keys = rng.standard_normal((24, 64))
    keys = (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(BFLOAT16)
    values = rng.standard_normal((24, 64)).astype(BFLOAT16)
    decays = -rng.uniform(0.05, 1.0, (24, 1)).astype(np.float32)
    rates = rng.uniform(0.05, 1.0, (24, 1)).astype(np.float32)
    ring = (values, keys, decays, rates)
    state = rng.standard_normal((64, 64)).astype(stored).astype(np.float32)
    call, outputs = random_call("gated_delta", tokens, 1), np.full((tokens, 64), np.nan, np.float32)
    folded = fold("gated_delta", state, ring, begin, length, 64, 0.0, call, outputs, part_count)
    committed = [[x[(begin + j) % 24] for x in ring] for j in range(length)]
    moved = serial("gated_delta", state, committed, np.zeros(64, int), None)
    wanted = serial_outputs("gated_delta", moved, call, 64, None, None)
    assert np.sqrt(np.mean((folded - moved) ** 2) / np.mean(moved**2)) < 5e-7
    assert np.sqrt(np.mean((outputs - wanted) ** 2) / np.mean(wanted**2)) < 1e-6

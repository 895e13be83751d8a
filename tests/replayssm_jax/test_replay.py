"""One step, one commit: every operation on a cache against whole texts run without one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replayssm_jax as rs
from replayssm_jax import cache as cache_module
from replayssm_jax import replay as replay_module
from replayssm_jax.cache import AttentionLayer
from tests.replayssm_jax.states import (
    MAX_LENGTH,
    WIDE,
    assert_same_state,
    conv_windows,
    prefilled,
    states_of,
    windows,
)
from tests.tiny_models import FAMILIES, VOCAB, assert_close, full_logits, hot_model, random_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_step_and_commit_reproduce_the_whole_text(family):
    # One family in all its layers; the others in the one layer whose programs further tests share.
    model = hot_model(family, layers=None if family == "mamba2" else 1)
    texts = random_tokens(3, 60)
    expected = full_logits(model, texts)
    for replay in (WIDE, None):
        logits, cache = prefilled(model, texts, [5, 1, 9], replay)
        assert_close(logits, expected[np.arange(3), [4, 0, 8]])
        rng, position = np.random.default_rng(1), np.array([5, 1, 9])
        while position.max() < 40:
            count = 4 if replay else 1
            logits, cache = rs.step(model, windows(texts, position, count), cache)
            for row, p in enumerate(position):
                assert_close(logits[row], expected[row, p : p + count])
            assert np.asarray(cache.pending).tolist() == [count] * 3
            accepted = rng.integers(0, count + 1, 3) if replay else np.ones(3, np.int64)
            cache = rs.commit(cache, accepted)
            position = position + accepted
            assert np.asarray(cache.position).tolist() == position.tolist()
        assert_same_state(model, cache, texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_b03_right_pads_touch_nothing(family):
    model = hot_model(family)
    texts, lengths = random_tokens(3, 34), np.array([11, 16, 1])
    expected = full_logits(model, texts)
    for replay in (WIDE, None):
        logits, cache = prefilled(model, texts, lengths, replay)
        assert_close(logits, expected[np.arange(3), lengths - 1])
        assert all(not window[2, :-1].any() for window in conv_windows(cache))
        position = lengths.copy()
        for _ in range(16):
            logits, cache = rs.step(model, windows(texts, position, 1), cache)
            assert_close(logits[:, 0], expected[np.arange(3), position])
            cache, position = rs.commit(cache, np.ones(3, np.int32)), position + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_b03_a_row_without_tokens_in_a_chunk_stays_bit_equal(family):
    model = hot_model(family)
    texts = random_tokens(3, 24)
    _, cache = prefilled(model, texts, [5, 8, 0], WIDE)
    for position in (5, 6):
        _, cache = rs.step(model, windows(texts, [position, position + 3, 0], 1), cache)
        cache = rs.commit(cache, np.array([1, 1, 0]))
    before = rs.select(cache, [0])
    _, cache = rs.prefill(model, windows(texts, [0, 8, 0], 16), np.array([0, 5, 13]), cache)
    after = rs.select(cache, [0])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
    assert np.asarray(cache.position).tolist() == [7, 15, 13]
    assert np.asarray(cache.length).tolist() == [2, 0, 0]


@pytest.mark.parametrize(
    ("family", "taps"),
    [
        ("mamba2", 2),
        pytest.param("mamba2", 3, marks=pytest.mark.slow),
        ("mamba2", 4),
        ("gated_delta", 4),
        ("kimi_delta", 4),
    ],
)
def test_b04_prompts_and_chunks_shorter_than_the_convolution(family, taps):
    model = hot_model(family, conv_kernel=taps, layers=1)
    text = random_tokens(1, 32)
    expected = full_logits(model, text)[0]
    texts = np.tile(text, (3, 1))
    for lengths in ([0, 1, 2], [3, 4, 2]):
        lengths, counts = np.array(lengths), np.array([1, 2, 3])
        logits, cache = prefilled(model, texts, lengths, WIDE)
        given = lengths > 0
        assert_close(np.asarray(logits)[given], expected[lengths[given] - 1])
        logits, cache = rs.prefill(model, windows(texts, lengths, 16), counts, cache)
        assert_close(logits, expected[lengths + counts - 1])
        logits, cache = rs.step(model, windows(texts, lengths + counts, 1), cache)
        assert_close(logits[:, 0], expected[lengths + counts])


@pytest.mark.parametrize("family", FAMILIES)
def test_b05_the_cut_of_a_prompt_into_chunks_does_not_matter(family):
    model = hot_model(family, layers=1)
    text = np.tile(random_tokens(1, 64), (3, 1))
    expected = full_logits(model, text[:1])[0, 36]
    states, _ = states_of(model, text, np.full(3, 37))
    for cut in ([16, 16, 5], [8, 8, 8, 8, 5], [5, 7, 1, 16, 8], [16, 16, 4, 1], [1] * 37):
        cache, position = model.init_cache(3, MAX_LENGTH, WIDE), 0
        for count in cut:
            tokens = text[:, position : position + 16]
            logits, cache = rs.prefill(model, tokens, np.array([count, count, count]), cache)
            position += count
        assert_close(logits[0], expected)
        for actual, reference in zip(rs.materialize(cache), states, strict=True):
            assert_close(actual, reference)


@pytest.mark.parametrize("garbage", [1e4, np.nan])
@pytest.mark.parametrize("family", FAMILIES)
def test_b17_a_recycled_row_is_bit_equal_to_a_fresh_one(family, garbage):
    model = hot_model(family, layers=1)
    texts = random_tokens(3, 24)

    def decode(cache):
        out = []
        logits, cache = rs.prefill(model, texts[:, :16], np.array([9, 9, 9]), cache)
        for position in range(9, 24):
            out.append(np.asarray(logits[0]))
            logits, cache = rs.step(model, texts[:, position : position + 1], cache)
            logits, cache = logits[:, 0], rs.commit(cache, np.ones(3, np.int32))
        return np.stack(out)

    def spoil(leaf):
        if leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.at[0].set(jnp.asarray(garbage, leaf.dtype))

    for replay in (WIDE, None):
        fresh = decode(model.init_cache(3, MAX_LENGTH, replay))
        for recycle in (
            lambda cache: rs.reset(cache, [0, 3]),
            lambda cache: rs.insert(cache, model.init_cache(1, MAX_LENGTH, cache.replay), [0]),
        ):
            spoilt = model.init_cache(3, MAX_LENGTH, replay)
            layers = tuple(jax.tree.map(spoil, layer) for layer in spoilt.layers)
            spoilt = dataclasses.replace(spoilt, layers=layers, start=spoilt.start.at[0].set(2))
            assert (decode(recycle(spoilt)) == fresh).all()


# Windows of four and six tokens differ from these in the size of their programs only.
BETWEEN = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("drafts", [1, pytest.param(3, marks=BETWEEN), pytest.param(5, marks=BETWEEN), 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_b18_rejected_drafts_leave_no_trace(family, drafts):
    model = hot_model(family, layers=1)
    texts = random_tokens(3, 60)
    expected = full_logits(model, texts)
    _, cache = prefilled(model, texts, [3, 4, 5], WIDE)
    position = np.array([3, 4, 5])
    for round_ in range(40):
        planted = (round_ + np.arange(3) * 2) % (drafts + 2)
        tokens = windows(texts, position, 1 + drafts)
        for row, wrong in enumerate(planted):
            tokens[row, wrong:] = (tokens[row, wrong:] + 1 + round_) % VOCAB
        logits, cache = rs.step(model, tokens, cache)
        for row, kept in enumerate(planted):
            if kept:
                assert_close(logits[row, :kept], expected[row, position[row] : position[row] + kept])
        cache = rs.commit(cache, planted)
        position = position + planted
        if position.max() > 38:
            assert_same_state(model, cache, texts)
            cache, position = rs.reset(cache, [0, 1, 2]), np.zeros(3, np.int64)


B19 = [(length, window) for length in (1, 2, 3, 4, 5, 8, 16) for window in (1, 2, 4, 8)]


B19_BY_DEFAULT = {(1, 1), (3, 2), (5, 4), (16, 8)}
B19_CASES = [
    pytest.param(
        case,
        size,
        id="L{}-W{}".format(*size),
        marks=[] if size in B19_BY_DEFAULT or size[0] < size[1] else BETWEEN,
    )
    for case, size in enumerate(B19)
]


@pytest.mark.parametrize(("case", "size"), B19_CASES)
def test_b19_ring_length_against_window(case, size):
    length, window = size
    if length < window:
        with pytest.raises(ValueError, match=f"buffer_length={length}, window={window}"):
            rs.ReplayConfig(buffer_length=length, window=window)
        return
    model = hot_model(FAMILIES[case % 3], layers=1)
    texts = random_tokens(3, 60)
    expected = full_logits(model, texts)
    replay = rs.ReplayConfig(buffer_length=length, window=window)
    _, cache = prefilled(model, texts, [1, 2, 3], replay)
    rng, position = np.random.default_rng(case), np.array([1, 2, 3])
    seen, empty = set(), True
    for round_ in range(200):
        if length == window == 1:
            assert np.asarray(replay_module.will_flush(cache, window)).all() == (not empty)
        empty = False
        logits, cache = rs.step(model, windows(texts, position, window), cache)
        if round_ % 8 == 0:
            for row, p in enumerate(position):
                assert_close(logits[row], expected[row, p : p + window])
        accepted = np.ones(3, np.int64) if window == 1 else rng.integers(0, window + 1, 3)
        cache = rs.commit(cache, accepted)
        position = position + accepted
        assert np.asarray(cache.length).max() <= length
        seen |= set(np.asarray(cache.length).tolist())
        if position.max() > 48:
            cache, position = rs.reset(cache, [0, 1, 2]), np.zeros(3, np.int64)
            _, cache = rs.prefill(model, texts[:, :16], np.array([1, 2, 3]), cache)
            position, empty = np.array([1, 2, 3]), True
    assert length in seen, "the ring was never exactly full"
    assert_same_state(model, cache, texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_b20_steps_of_different_widths_take_turns(family):
    model = hot_model(family, layers=1)
    texts = random_tokens(3, 60)
    expected = full_logits(model, texts)
    _, cache = prefilled(model, texts, [4, 6, 5], WIDE)
    position = np.array([4, 6, 5])
    for drafts, forced in zip([7, 0, 0, 3, 0, 7, 7, 0] * 3, [3, 0, 0, 0, 0, 7, 1, 0] * 3, strict=True):
        logits, cache = rs.step(model, windows(texts, position, 1 + drafts), cache)
        for row, p in enumerate(position):
            assert_close(logits[row], expected[row, p : p + 1 + drafts])
        accepted = np.array([1 + forced, 1 + drafts // 2, 0])
        cache, position = rs.commit(cache, accepted), position + accepted
        if position.max() > 44:
            assert_same_state(model, cache, texts)
            cache, position = rs.reset(cache, [0, 1]), np.array([0, 0, position[2]])


def test_b21_the_end_of_the_cache_cuts_a_window_and_writes_nothing_beyond():
    model = hot_model("gated_delta")
    texts = random_tokens(3, 70)
    expected = full_logits(model, texts)
    cache = model.init_cache(3, 20, WIDE)
    for position, counts in (([0, 0, 0], [16, 10, 1]), ([16, 10, 1], [2, 0, 0])):
        _, cache = rs.prefill(model, windows(texts, position, 16), np.array(counts), cache)
    logits, cache = rs.step(model, windows(texts, [18, 10, 1], 4), cache)
    assert_close(logits[0, :2], expected[0, 18:20])
    assert_close(logits[1], expected[1, 10:14])
    cache = rs.commit(cache, np.array([2, 4, 0]))
    assert np.asarray(cache.position).tolist() == [20, 14, 1]
    with pytest.raises(ValueError, match="Row 0 would hold 21 tokens.*max_length=20"):
        rs.prefill(model, texts[:, 20:36], np.array([1, 1, 1]), cache)
    logits, cache = rs.step(model, windows(texts, [20, 14, 1], 4), cache)
    assert_close(logits[1], expected[1, 14:18])


def test_accepted_counts_are_clipped_and_a_second_commit_moves_nothing():
    model = hot_model("mamba2", layers=1)
    cache = model.init_cache(3, MAX_LENGTH, WIDE)
    _, cache = rs.step(model, random_tokens(3, 4), cache)
    cache = rs.commit(cache, np.array([-3, 1, 7]))
    assert np.asarray(cache.length).tolist() == [0, 1, 4]
    cache = rs.commit(cache, np.array([2, 2, 2]))
    assert np.asarray(cache.length).tolist() == [0, 1, 4]
    assert np.asarray(cache.pending).tolist() == [0, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_accepting_nothing_keeps_the_state_and_the_next_step_overwrites(family):
    model = hot_model(family, layers=1)
    texts = random_tokens(3, 40)
    expected = full_logits(model, texts)
    _, cache = prefilled(model, texts, [6, 7, 8], WIDE)
    before = rs.materialize(cache)
    for seed in (1, 2, 3):
        _, cache = rs.step(model, random_tokens(3, 4, seed=seed), cache)
        if seed != 2:
            cache = rs.commit(cache, np.zeros(3, np.int32))
    for old, new in zip(before, rs.materialize(cache), strict=True):
        assert (np.asarray(old) == np.asarray(new)).all()
    logits, cache = rs.step(model, windows(texts, [6, 7, 8], 4), cache)
    assert_close(logits[0], expected[0, 6:10])


def test_flush_at_shortens_the_first_window_only():
    model = hot_model("mamba2", layers=1)
    texts = random_tokens(3, 40)
    expected = full_logits(model, texts)
    _, cache = prefilled(model, texts, [2, 2, 2], WIDE, flush_at=np.array([1, 4, 8]))
    steps_of_flush = [[], [], []]
    for index in range(20):
        for row in np.flatnonzero(replay_module.will_flush(cache, 1)):
            steps_of_flush[row].append(index)
        logits, cache = rs.step(model, windows(texts, [2 + index] * 3, 1), cache)
        assert_close(logits[:, 0], expected[:, 2 + index])
        cache = rs.commit(cache, np.ones(3, np.int32))
    assert steps_of_flush == [[1, 9, 17], [4, 12], [8, 16]]
    assert np.asarray(cache.flush_at).tolist() == [8, 8, 8]
    for bad in (0, 9, [1, 2], 2.5):
        with pytest.raises(ValueError, match="flush_at"):
            model.init_cache(3, MAX_LENGTH, WIDE, flush_at=bad)


def test_an_empty_flush_writes_nothing():
    model = hot_model("gated_delta", layers=1)
    texts = random_tokens(3, 20)
    _, cache = prefilled(model, texts, [5, 6, 7], WIDE, flush_at=1)
    before = np.asarray(cache.layers[0].checkpoint)
    _, cache = rs.step(model, windows(texts, [5, 6, 7], 4), cache)
    assert np.asarray(cache.layers[0].checkpoint).tobytes() == before.tobytes()
    assert np.asarray(cache.start).tolist() == [5, 6, 7]
    assert np.asarray(cache.flush_at).tolist() == [8, 8, 8]


def test_prefill_folds_the_ring_first():
    model = hot_model("kimi_delta")
    texts = random_tokens(3, 40)
    expected = full_logits(model, texts)
    _, cache = prefilled(model, texts, [3, 8, 4], WIDE)
    _, cache = rs.step(model, windows(texts, [3, 8, 4], 4), cache)
    cache = rs.commit(cache, np.array([3, 1, 4]))
    logits, cache = rs.prefill(model, windows(texts, [6, 9, 8], 16), np.array([9, 7, 1]), cache)
    assert_close(logits, [expected[0, 14], expected[1, 15], expected[2, 8]])
    assert np.asarray(cache.start).tolist() == [15, 16, 9]
    assert not np.asarray(cache.length).any()
    assert_same_state(model, cache, texts)


def test_hidden_states_come_along_on_request():
    model = hot_model("mamba2", layers=1)
    tokens = random_tokens(3, 16)
    expected = np.asarray(jax.jit(lambda model, tokens: model.forward(tokens))(model, jnp.asarray(tokens)))
    cache = model.init_cache(3, MAX_LENGTH, WIDE)
    logits, hidden, cache = rs.prefill(model, tokens, np.array([6, 4, 5]), cache, return_hidden=True)
    assert hidden.shape == (3, 16, 64)
    assert logits.shape == (3, VOCAB)
    for row, length in enumerate((6, 4, 5)):
        assert_close(hidden[row, :length], expected[row, :length])
    _, hidden, cache = rs.step(model, windows(tokens, [6, 4, 5], 2), cache, return_hidden=True)
    assert_close(hidden, [expected[0, 6:8], expected[1, 4:6], expected[2, 5:7]])


def test_select_insert_and_reset_move_whole_rows():
    model = hot_model("gated_delta")
    texts = random_tokens(3, 40)
    expected = full_logits(model, texts)
    _, cache = prefilled(model, texts, [3, 5, 7], WIDE, flush_at=[2, 3, 4])
    for index in range(3):
        _, cache = rs.step(model, windows(texts, [3 + index, 5 + index, 7 + index], 1), cache)
        cache = rs.commit(cache, np.ones(3, np.int32))
    part = rs.select(cache, np.array([2, 0, 2]))
    assert np.asarray(part.position).tolist() == [10, 6, 10]
    assert np.asarray(part.seed).tolist() == np.asarray(cache.seed)[[2, 0, 2]].tolist()
    cache = rs.insert(cache, part, np.array([0, 3, 1]))
    assert np.asarray(cache.position).tolist() == [10, 10, 10]
    logits, cache = rs.step(model, windows(texts[[2, 2, 2]], [10] * 3, 1), cache)
    assert_close(logits[:, 0], np.tile(expected[2, 10], (3, 1)))
    cache = rs.commit(cache, np.ones(3, np.int32))
    seeds = np.asarray(cache.seed)
    cache = rs.reset(cache, np.array([1, 3]), seeds=np.array([77, 88], np.uint32))
    assert np.asarray(cache.seed).tolist() == [seeds[0], 77, seeds[2]]
    assert np.asarray(cache.flush_at)[1] == 8
    assert np.asarray(cache.position).tolist() == [11, 0, 11]
    logits, cache = rs.step(model, np.stack([texts[2, 11:12], texts[0, :1], texts[2, 11:12]]), cache)
    assert_close(logits[1, 0], expected[0, 0])
    assert_close(logits[0, 0], expected[2, 11])
    assert rs.select(cache, []).batch == 0
    cache = rs.reset(cache, np.array([-1, 3]))
    assert np.asarray(cache.position).tolist() == [11, 0, 0]


def test_nothing_that_keeps_its_argument_shares_a_buffer_with_it():
    model = hot_model("mamba2")
    for replay in (WIDE, None):
        _, cache = prefilled(model, random_tokens(3, 16), [3, 4, 5], replay)
        mine = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache) if leaf.size}
        for made in (rs.select(cache, [0, 1]), rs.materialize(cache)):
            assert not mine & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(made) if leaf.size}
        parameter = model.layers[0].mixer.D[...]
        _, cache = rs.step(model, random_tokens(3, 1), cache)
        assert not parameter.is_deleted()


@pytest.mark.parametrize("replay", [WIDE, None], ids=["replay", "eager"])
@pytest.mark.parametrize(("family", "layers"), [("mamba2", 2), ("gated_delta", 1), ("kimi_delta", 1)])
def test_donation_reuses_every_byte_of_the_cache(family, layers, replay):
    model = hot_model(family, layers=layers)
    cache = model.init_cache(3, MAX_LENGTH, replay)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    count = jnp.ones((3,), jnp.int32)
    tokens = jnp.zeros((3, 4 if replay else 1), jnp.int32)
    programs = {
        "step": replay_module._step.lower(model, tokens, cache, return_hidden=False),
        "prefill": replay_module._prefill.lower(model, tokens, count, cache, return_hidden=False),
    }
    if family == "mamba2":
        programs |= {
            "commit": replay_module._commit.lower(cache, count),
            "insert": cache_module._insert.lower(cache, cache, count),
            "reset": cache_module._reset.lower(cache, count, None),
        }
    for name, program in programs.items():
        assert program.compile().memory_analysis().alias_size_in_bytes == size, name


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_an_eager_step_copies_no_state(family):
    model = hot_model(family, layers=1)
    cache = model.init_cache(3, MAX_LENGTH, None)
    program = replay_module._step.lower(model, jnp.zeros((3, 1), jnp.int32), cache, return_hidden=False)
    state = cache.layers[0].checkpoint
    shape = "f32[{}]".format(",".join(map(str, state.shape)))
    copies = [line for line in program.compile().as_text().splitlines() if " copy(" in line and shape in line]
    assert not copies


@pytest.mark.parametrize("replay", [WIDE, None], ids=["replay", "eager"])
def test_save_and_restore(tmp_path, replay):
    model = hot_model("mamba2")
    texts = random_tokens(3, 30)
    _, cache = prefilled(model, texts, [3, 6, 4], replay)
    _, cache = rs.step(model, windows(texts, [3, 6, 4], 1), cache)
    cache = rs.commit(cache, np.ones(3, np.int32))
    rs.save_cache(cache, tmp_path / "saved")
    with pytest.raises(FileExistsError, match="saved exists already"):
        rs.save_cache(cache, tmp_path / "saved")
    restored = rs.restore_cache(tmp_path / "saved")
    assert jax.tree.structure(restored) == jax.tree.structure(cache)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(restored), strict=True):
        assert old.dtype == new.dtype
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
    assert {path.name for path in tmp_path.iterdir()} == {"saved"}
    about = (tmp_path / "saved" / "cache.json").read_text()
    (tmp_path / "saved" / "cache.json").write_text(
        about.replace('"schema_version": 4', '"schema_version": 9')
    )
    with pytest.raises(ValueError, match="schema version 9; this version reads 3 and 4"):
        rs.restore_cache(tmp_path / "saved")
    with pytest.raises(ValueError, match="is not a saved cache"):
        rs.restore_cache(tmp_path)
    changed = about.replace('"mamba2"', '"mamba9"')
    for damaged in ("[]", '{"schema_version": 4}', changed):
        (tmp_path / "saved" / "cache.json").write_text(damaged)
        with pytest.raises(ValueError, match="schema version None|cannot be restored .KeyError"):
            rs.restore_cache(tmp_path / "saved")
    (tmp_path / "saved" / "cache.json").write_text(about)
    files = [path for path in (tmp_path / "saved" / "arrays").rglob("*") if path.is_file()]
    for file in files:
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match="cannot be restored"):
        rs.restore_cache(tmp_path / "saved")


def test_files_with_columns_before_heads_are_restored(tmp_path):
    """Schema 3 kept keys and values as [B, S, N, D]."""
    model = hot_model("mamba2")
    _, cache = prefilled(model, random_tokens(3, 30), [3, 6, 4], WIDE)

    def swapped(layer):
        if not isinstance(layer, AttentionLayer):
            return layer
        return AttentionLayer(k=layer.k.swapaxes(1, 2), v=layer.v.swapaxes(1, 2))

    old = dataclasses.replace(cache, layers=tuple(map(swapped, cache.layers)))
    assert jax.tree.map(np.shape, old) != jax.tree.map(np.shape, cache)
    rs.save_cache(old, tmp_path / "saved")
    about = tmp_path / "saved" / "cache.json"
    about.write_text(about.read_text().replace('"schema_version": 4', '"schema_version": 3'))
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(rs.restore_cache(about.parent)), strict=True):
        np.testing.assert_array_equal(old, new)


def test_wrong_calls_are_refused_and_lose_nothing():
    model = hot_model("mamba2", layers=1)
    replay = rs.ReplayConfig(buffer_length=4, window=2)
    cache = model.init_cache(2, MAX_LENGTH, replay)
    refused = [
        (lambda: rs.step(model, random_tokens(2, 3), cache), "window=2 and takes at most 2 tokens"),
        (lambda: rs.step(model, random_tokens(3, 1), cache), r"\[2, T\]"),
        (lambda: rs.step(model, random_tokens(2), cache), r"\[2, T\]"),
        (lambda: rs.step(model, np.zeros((2, 1), np.float32), cache), "must be integers"),
        (lambda: rs.prefill(model, random_tokens(2, 4), [1, 5], cache), r"lengths must lie in 0\.\.4"),
        (lambda: rs.prefill(model, random_tokens(2, 4), [1], cache), "lengths must have shape"),
        (
            lambda: rs.prefill(model, random_tokens(2, 70), [70, 1], cache),
            "Row 0 would hold 70.*max_length=64",
        ),
        (lambda: rs.step(model, np.full((2, 1), VOCAB), cache), r"tokens must lie in 0\.\.96, got 97\.\.97"),
        (lambda: rs.prefill(model, np.full((2, 1), -1), [1, 1], cache), r"tokens must lie in 0\.\.96"),
        (lambda: rs.commit(cache, [1]), "accepted must have shape"),
        (lambda: rs.select(cache, [2]), r"rows in 0\.\.1"),
        (lambda: rs.select(cache, [[0]]), "one-dimensional"),
        (lambda: rs.reset(cache, [0], seeds=[1, 2]), "seeds"),
        (lambda: rs.insert(cache, model.init_cache(1, 32, replay), [0]), "same max_length.*64.*32"),
        (lambda: rs.insert(cache, model.init_cache(1, MAX_LENGTH, None), [0]), "same replay"),
        (lambda: rs.insert(cache, model.init_cache(1, MAX_LENGTH, replay), [0, 1]), "2 row indices"),
        (
            lambda: rs.insert(cache, hot_model("mamba2").init_cache(1, MAX_LENGTH, replay), [0]),
            "layers, shapes and dtypes",
        ),
        (lambda: model.init_cache(0, MAX_LENGTH), "batch must be an integer of at least 1"),
        (lambda: model.init_cache(1, 0), "max_length"),
        (lambda: model.init_cache(1, 8, None, flush_at=1), "no meaning in an eager cache"),
        (lambda: rs.ReplayConfig(buffer_length=0), "buffer_length must be an integer of at least 1"),
        (lambda: rs.ReplayConfig(implementation="triton"), "implementation must be"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    _, cache = rs.step(model, random_tokens(2, 1), cache)
    eager = model.init_cache(2, MAX_LENGTH, None)
    with pytest.raises(ValueError, match="an eager cache takes at most 1 tokens"):
        rs.step(model, random_tokens(2, 2), eager)


def test_a_donated_cache_is_refused_by_every_operation(tmp_path):
    model = hot_model("mamba2", layers=1)
    spent = model.init_cache(2, MAX_LENGTH)
    _, cache = rs.step(model, random_tokens(2, 1), spent)
    calls = [
        lambda: rs.step(model, random_tokens(2, 1), spent),
        lambda: rs.prefill(model, random_tokens(2, 4), [1, 1], spent),
        lambda: rs.commit(spent, [1, 1]),
        lambda: rs.materialize(spent),
        lambda: rs.select(spent, [0]),
        lambda: rs.insert(spent, cache, [0, 1]),
        lambda: rs.reset(spent, [0]),
        lambda: rs.save_cache(spent, tmp_path / "spent"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="was donated to an earlier"):
            call()
    with pytest.raises(ValueError, match="The part was donated"):
        rs.insert(cache, spent, [0, 1])
    assert not np.asarray(rs.commit(cache, [1, 1]).pending).any()


def test_b24_counts_and_positions_compile_nothing_new():
    model = hot_model("mamba2", layers=1)
    texts = random_tokens(3, 60)
    cache = model.init_cache(3, MAX_LENGTH, rs.ReplayConfig(buffer_length=7, window=4))
    before = [function._cache_size() for function in (replay_module._step, replay_module._commit)]
    for round_ in range(12):
        _, cache = rs.step(model, texts[:, :4], cache)
        cache = rs.commit(cache, np.array([round_ % 5, (round_ + 1) % 5, 4]))
    after = [function._cache_size() for function in (replay_module._step, replay_module._commit)]
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 1]


def test_seeds_depend_on_seed_and_row_alone():
    model = hot_model("mamba2", layers=1)
    first, second = (np.asarray(model.init_cache(batch, 8, seed=5).seed) for batch in (2, 4))
    assert (first == second[:2]).all()
    assert len(set(second.tolist())) == 4
    assert first[0] != np.asarray(model.init_cache(2, 8, seed=6).seed)[0]


class Rows:
    """What every row of a cache should hold, as plain lists of tokens."""

    def __init__(self, family: str, batch: int):
        self.model = hot_model(family, layers=1)
        self.cache = self.model.init_cache(batch, MAX_LENGTH, WIDE)
        self.tokens = [[] for _ in range(batch)]

    def room(self, count: int) -> bool:
        return max(map(len, self.tokens)) + count <= 44

    def texts(self, extra=None) -> np.ndarray:
        texts = np.zeros((len(self.tokens), 56), np.int32)
        for row, tokens in enumerate(self.tokens):
            full = tokens + ([] if extra is None else extra[row].tolist())
            texts[row, : len(full)] = full
        return texts


operations = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "prefill", "select", "insert", "reset"]),
        st.integers(0, 2**31),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(schedule=operations)
def test_any_schedule_of_operations_equals_the_text_it_committed(family, schedule):
    rows, batch = Rows(family, 3), 3
    for name, seed in schedule:
        rng = np.random.default_rng(seed)
        if name == "step" and rows.room(4):
            tokens = random_tokens(batch, 4, seed=seed)
            logits, rows.cache = rs.step(rows.model, tokens, rows.cache)
            expected = full_logits(rows.model, rows.texts(tokens))
            for row, held in enumerate(rows.tokens):
                assert_close(logits[row], expected[row, len(held) : len(held) + 4])
            accepted = rng.integers(0, 5, batch)
            rows.cache = rs.commit(rows.cache, accepted)
            for held, new, count in zip(rows.tokens, tokens.tolist(), accepted, strict=True):
                held.extend(new[:count])
        elif name == "prefill" and rows.room(6):
            tokens, counts = random_tokens(batch, 16, seed=seed), rng.integers(0, 7, batch)
            _, rows.cache = rs.prefill(rows.model, tokens, counts, rows.cache)
            for held, new, count in zip(rows.tokens, tokens.tolist(), counts, strict=True):
                held.extend(new[:count])
        elif name == "select":
            order = rng.integers(0, batch, batch)
            rows.cache = rs.select(rows.cache, order)
            rows.tokens = [list(rows.tokens[row]) for row in order]
        elif name == "insert":
            source, target = rng.integers(0, batch), int(rng.integers(0, batch + 1))
            rows.cache = rs.insert(rows.cache, rs.select(rows.cache, [source]), [target])
            if target < batch:
                rows.tokens[target] = list(rows.tokens[source])
        elif name == "reset":
            row = int(rng.integers(0, batch))
            rows.cache, rows.tokens[row] = rs.reset(rows.cache, [row]), []
        assert np.asarray(rows.cache.position).tolist() == [len(held) for held in rows.tokens]
    assert_same_state(rows.model, rows.cache, rows.texts())

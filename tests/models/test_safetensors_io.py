"""Safetensors files and shard indices: bits are kept, and every disagreement is named."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from models.config import CheckpointError
from models.safetensors_io import INDEX, SINGLE, find_tensors, read_header
from tests.models.tiny import M2, tensors, write

EXTREMES = np.array([1.0, 1.0078125, 3.389e38, -0.0, 1e-40, np.nan], np.float32)


def save_raw(file, entries: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A file written by hand, with any dtype name."""
    header, data = {}, b""
    for name, (dtype, shape, content) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def shards(tmp_path):
    return write(tmp_path / "m2", M2, shards=3)


def places(directory) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text())["weight_map"]


def place(directory, **moved) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= moved
    (directory / INDEX).write_text(json.dumps(index))


def test_b14_bits_are_kept_without_torch(tmp_path):
    stored = {
        "bf16": ("BF16", EXTREMES.astype(ml_dtypes.bfloat16)),
        "f16": ("F16", np.array([1.0, -0.0, 6e-8], np.float16)),
        "f32": ("F32", EXTREMES),
        "f8": ("F8_E4M3", np.array([1.0, -0.0, 448.0, 2**-9], ml_dtypes.float8_e4m3fn)),
        "i64": ("I64", np.array([[2**62, -1]], np.int64)),
    }
    save_raw(tmp_path / SINGLE, {n: (d, a.shape, a.tobytes()) for n, (d, a) in stored.items()})
    found = find_tensors(tmp_path)
    for name, (dtype, array) in stored.items():
        assert found[name].dtype == dtype
        assert found[name].shape == array.shape
        read = found[name].read()
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()
    wide = found["bf16"].read().astype(np.float32)
    assert np.signbit(wide[3]) and wide[3] == 0.0
    assert 0.0 < wide[4] < 1e-39, "the subnormal survives"
    assert np.isfinite(wide[2])


def test_b14_an_unsupported_dtype_is_refused_by_tensor_name(tmp_path):
    save_raw(tmp_path / SINGLE, {"odd.weight": ("F4", (4,), b"\0\0")})
    with pytest.raises(
        CheckpointError, match=r"odd\.weight in model\.safetensors has the unsupported dtype F4"
    ):
        find_tensors(tmp_path)["odd.weight"].read()


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_refused(tmp_path):
    save_raw(tmp_path / SINGLE, {"w": ("F32", (3,), b"\0" * 8)})
    with pytest.raises(CheckpointError, match="w in model.safetensors takes 8 bytes, but F32 of shape"):
        find_tensors(tmp_path)["w"].read()


def test_an_empty_tensor_and_a_scalar_are_read(tmp_path):
    save_raw(tmp_path / SINGLE, {"none": ("F32", (0, 4), b""), "one": ("F32", (), np.float32(7).tobytes())})
    found = find_tensors(tmp_path)
    assert found["none"].read().shape == (0, 4)
    assert found["one"].read() == 7.0


def test_b15_a_missing_shard_is_named(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the shard model-00002-of-00003.safetensors is missing"):
        find_tensors(shards)


def test_b15_every_missing_shard_is_named_at_once(shards):
    for number in (2, 3):
        (shards / f"model-{number:05d}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003.*model-00003-of-00003"):
        find_tensors(shards)


def test_b15_the_index_decides_between_two_copies(shards):
    third, first = "model-00003-of-00003.safetensors", "model-00001-of-00003.safetensors"
    name = next(n for n, file in places(shards).items() if file == third)
    stale = {n: t.read() for n, t in read_header(shards / first).items()}
    stale[name] = np.full(read_header(shards / third)[name].shape, 7.0, np.float32)
    save_raw(shards / first, {n: ("F32", a.shape, a.tobytes()) for n, a in stale.items()})
    assert not (find_tensors(shards)[name].read() == 7.0).any()
    place(shards, **{name: first})
    assert (find_tensors(shards)[name].read() == 7.0).all()


def test_b15_a_file_beside_the_index_is_ignored(shards):
    save_raw(shards / SINGLE, {"stray": ("F32", (1,), b"\0" * 4)})
    assert "stray" not in find_tensors(shards)


def test_b15_an_entry_whose_tensor_is_absent_is_named_with_its_file(shards):
    place(shards, **{"ghost.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors lacks ghost\.weight"):
        find_tensors(shards)


def test_b15_one_file_without_an_index_loads(tmp_path):
    directory = write(tmp_path / "one", M2)
    assert len(find_tensors(directory)) == len(tensors(M2))
    (directory / SINGLE).rename(directory / "weights.safetensors")
    assert len(find_tensors(directory)) == len(tensors(M2))


def test_b15_a_shard_cut_short_is_refused(shards):
    file = shards / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is cut short"):
        find_tensors(shards)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="cut short"):
        find_tensors(shards)


def test_files_that_are_no_safetensors_are_named(tmp_path):
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", 4) + b"nope")
    with pytest.raises(CheckpointError, match="model.safetensors is not a safetensors file"):
        find_tensors(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors and no model.safetensors.index.json"):
        find_tensors(tmp_path)
    for name in ("a", "b"):
        save_raw(tmp_path / f"{name}.safetensors", {})
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(a.safetensors, b.safetensors\)"):
        find_tensors(tmp_path)


def test_a_broken_index_is_named(shards):
    place(shards, w="../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="'../elsewhere.safetensors'"):
        find_tensors(shards)
    (shards / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="model.safetensors.index.json cannot be read"):
        find_tensors(shards)

"""`convert`: an Orbax directory that loads back bit for bit, whole or not at all."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models import checkpoint
from models.config import CheckpointError
from models.orbax_io import MARKER, read_parameters, write_parameters
from replayssm_jax.api import convert, load
from tests.models.test_tokenizer import write_tokenizer
from tests.models.tiny import GDN, M2, tensors, write


def mixed(raw: dict) -> dict[str, np.ndarray]:
    """bfloat16 weights among which some stay float32."""
    weights = {n: a.astype(ml_dtypes.bfloat16) for n, a in tensors(raw).items()}
    return weights | {n: tensors(raw)[n] for n in weights if n.endswith(("A_log", "norm.weight"))}


def leaves(loaded) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(loaded.model)]


@pytest.mark.parametrize("raw", [M2, GDN | {"tie_word_embeddings": True}], ids=["M2", "GDN"])
def test_a_converted_checkpoint_loads_back_bit_for_bit(raw, tmp_path, monkeypatch):
    source = write(tmp_path / "source", raw, mixed(raw), generation={"eos_token_id": [2, 11]})
    write_tokenizer(source)
    converted = convert(source, tmp_path / "new" / "converted")
    twice = convert(converted, tmp_path / "again")
    for backend, dtype in (("cpu", None), ("gpu", None), ("cpu", jnp.bfloat16)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        expected = load(source, dtype=dtype)
        for directory in (converted, twice):
            found = load(directory, dtype=dtype)
            assert found.config == expected.config
            assert found.stop_ids == expected.stop_ids == (2, 11, 5)
            assert found.tokenizer("w7")["input_ids"] == [7]
            for a, b in zip(leaves(found), leaves(expected), strict=True):
                assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def test_a_destination_that_is_not_empty_is_refused(tmp_path):
    source = write(tmp_path / "source", M2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    for taken in ("full", "full/mine.txt"):
        with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
            convert(source, tmp_path / taken)
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty") == tmp_path / "empty"


def test_nothing_half_written_stays_behind(tmp_path, monkeypatch):
    source = write(tmp_path / "source", M2)

    def fail(directory, parameters):
        write_parameters(directory, parameters)
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoint, "write_parameters", fail)
    with pytest.raises(OSError, match="the disk is full"):
        convert(source, tmp_path / "destination")
    assert [item.name for item in tmp_path.iterdir()] == ["source"]


def test_a_source_that_does_not_load_is_not_converted(tmp_path):
    weights = tensors(M2)
    del weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match="missing lm_head.weight"):
        convert(write(tmp_path / "source", M2, weights), tmp_path / "destination")
    assert not (tmp_path / "destination").exists()


def test_a_converted_directory_that_does_not_fit_is_named(tmp_path):
    converted = convert(write(tmp_path / "source", M2), tmp_path / "converted")
    raw = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(
        json.dumps(raw | {"vocab_size": 98, "hybrid_override_pattern": "M*MM"})
    )
    with pytest.raises(CheckpointError) as problem:
        load(converted)
    for words in (
        "missing layers.3.mixer.A_log",
        "unknown layers.3.mixer.down_proj.kernel",
        "embed.weight has the shape (97, 64), expected (98, 64)",
    ):
        assert words in str(problem.value)


def test_another_version_and_broken_parameters_are_named(tmp_path):
    converted = convert(write(tmp_path / "source", M2), tmp_path / "converted")
    assert ("embed", "weight") in read_parameters(converted)
    (converted / "parameters" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="the parameters in .* cannot be read"):
        load(converted)
    (converted / MARKER).write_text('{"version": 99}')
    with pytest.raises(CheckpointError, match="has the layout version 99; this library reads version 1"):
        load(converted)
    (converted / MARKER).write_text("{")
    with pytest.raises(CheckpointError, match="replayssm.json cannot be read"):
        load(converted)

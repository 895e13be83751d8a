"""Saving a cache to disk and restoring it, through Orbax."""

import dataclasses
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax.backend import device_refusal
from replayssm_jax.cache import AttentionLayer, Cache, Reach, RecurrentLayer, check_usable, kernel_constants
from replayssm_jax.config import DecodingConfig, EagerConfig, ReplayConfig
from replayssm_jax.precision import Scaled, Stored, in_order
from replayssm_jax.recurrence import RECURRENCES

SCHEMA_VERSION = 4
# Files of that version have the columns of keys and values before their heads.
_COLUMNS_FIRST = 3
_METHODS = {method.__name__: method for method in (ReplayConfig, EagerConfig)}
_CURSORS = ("start", "length", "pending", "flush_at", "seed")
_SCALED = ("codes", "scale", "block_scale")


def _fields(item: Any) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}


def _layer_arrays(layer) -> dict[str, Any]:
    if isinstance(layer, AttentionLayer):
        return _fields(layer)
    arrays = {"conv": layer.conv, **_stored_arrays("checkpoint", layer.checkpoint)}
    if layer.copy is not None:
        arrays |= _stored_arrays("copy", layer.copy)
    arrays |= {f"heads.{name}": value for name, value in _fields(layer.heads).items()}
    if layer.ring is not None:
        arrays |= {f"ring.{name}": value for name, value in _fields(layer.ring).items()}
    if layer.reach is not None:
        arrays |= {f"reach.{name}": value for name, value in _fields(layer.reach).items()}
    return arrays


def _arrays(cache: Cache) -> dict[str, jax.Array]:
    arrays = {name: getattr(cache, name) for name in _CURSORS}
    for index, layer in enumerate(cache.layers):
        if layer is not None:
            arrays |= {f"layers.{index}.{name}": value for name, value in _layer_arrays(layer).items()}
    return arrays


def _stored_arrays(name: str, stored: Stored) -> dict[str, Any]:
    if not isinstance(stored, Scaled):
        return {name: stored}
    stored = in_order(stored, lanes=False)
    return {f"{name}.{part}": getattr(stored, part) for part in _SCALED if getattr(stored, part) is not None}


def _layer_kind(layer) -> str | None:
    if layer is None:
        return None
    return layer.recurrence if isinstance(layer, RecurrentLayer) else "attention"


def save_cache(cache: Cache, path) -> None:
    """Write a cache, its configuration and a schema version into a new directory.

    cache: stays usable. path: must not exist; it appears whole or not at all.
    Raises ValueError for a donated cache and FileExistsError when the path is taken.
    """
    import orbax.checkpoint as ocp

    check_usable(cache)
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists already; save_cache writes a new directory.")
    arrays = _arrays(cache)
    about = {
        "schema_version": SCHEMA_VERSION,
        "method": type(cache.replay).__name__,
        "replay": dataclasses.asdict(cache.replay),
        "max_length": cache.max_length,
        "layers": [_layer_kind(layer) for layer in cache.layers],
        "arrays": {name: [list(array.shape), array.dtype.name] for name, array in arrays.items()},
    }
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        (part / "cache.json").write_text(json.dumps(about, indent=1) + "\n")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(part / "arrays", arrays)
            checkpointer.wait_until_finished()
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def restore_cache(path) -> Cache:
    """Read a cache that `save_cache` wrote, onto the default device.

    Raises ValueError when the directory is not a saved cache, has another schema version or is damaged.
    """
    path = Path(path).absolute()
    try:
        about = json.loads((path / "cache.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a saved cache: cache.json cannot be read ({error}).") from error
    version = about.get("schema_version") if isinstance(about, dict) else None
    if version not in (SCHEMA_VERSION, _COLUMNS_FIRST):
        raise ValueError(
            f"{path} has cache schema version {version}; "
            f"this version reads {_COLUMNS_FIRST} and {SCHEMA_VERSION}."
        )
    try:
        return _restored(path, about)
    except Exception as problem:  # tensorstore and Orbax raise many kinds
        reason = str(problem).strip().split("\n")[0]
        raise ValueError(
            f"The cache in {path} cannot be restored ({type(problem).__name__}: {reason})."
        ) from problem


def _restored(path: Path, about: dict[str, Any]) -> Cache:
    import orbax.checkpoint as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
        for name, (shape, dtype) in about["arrays"].items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(path / "arrays", target)
    replay = _served(_METHODS[about["method"]](**about["replay"]))
    layers = tuple(_layer(kind, index, arrays, replay) for index, kind in enumerate(about["layers"]))
    if about["schema_version"] == _COLUMNS_FIRST:
        layers = tuple(map(_heads_first, layers))
    cursors = {name: arrays[name] for name in _CURSORS}
    return Cache(layers=layers, replay=replay, max_length=about["max_length"], **cursors)


def _heads_first(layer: Any) -> Any:
    if not isinstance(layer, AttentionLayer):
        return layer
    return AttentionLayer(k=jnp.swapaxes(layer.k, 1, 2), v=jnp.swapaxes(layer.v, 1, 2))


def _served(replay: DecodingConfig) -> DecodingConfig:
    """The portable backend reads any ring; the kernels' caches go on with it where they cannot run."""
    if replay.implementation == "pallas" and device_refusal() is not None:
        return dataclasses.replace(replay, implementation="xla")
    return replay


def _layer(kind: str | None, index: int, arrays: dict[str, jax.Array], replay: DecodingConfig):
    def part(prefix: str) -> dict[str, jax.Array]:
        prefix = f"layers.{index}.{prefix}"
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    if kind is None:
        return None
    if kind == "attention":
        return AttentionLayer(**part(""))

    def stored(name: str, format: str) -> Stored | None:
        parts = part(f"{name}.")
        if not parts:
            return arrays.get(f"layers.{index}.{name}")
        saved = Scaled(
            codes=parts["codes"],
            scale=parts["scale"],
            block_scale=parts.get("block_scale"),
            format=format,
        )
        return in_order(saved, lanes=name == "copy" and replay.implementation == "pallas")

    recurrence = RECURRENCES[kind]
    ring, reach = part("ring."), part("reach.")
    if reach:
        # Earlier files lack it: then nothing is known.
        reach.setdefault("least", jnp.zeros_like(reach["added"]))
    formats = (replay.recurrence, replay.read) if isinstance(replay, ReplayConfig) else ("fp32", "fp32")
    checkpoint, copy = map(stored, ("checkpoint", "copy"), formats)
    if checkpoint is None:
        raise KeyError(f"layers.{index}.checkpoint")
    heads = recurrence.Heads(**part("heads."))
    return RecurrentLayer(
        checkpoint=checkpoint,
        copy=copy,
        index=index,
        conv=arrays[f"layers.{index}.conv"],
        ring=recurrence.Inputs(**ring) if ring else None,
        heads=heads,
        recurrence=kind,
        reach=Reach(**reach) if reach else None,
        constants=kernel_constants(heads, replay),
    )

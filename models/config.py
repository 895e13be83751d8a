"""Model configurations: `config.json` of a supported family, checked and read into a frozen dataclass.

Every rule where published files differ stands here, once. Absent fields take the defaults of the family's
configuration class in transformers 5.24. Anything that would change the arithmetic and is not built is
refused by name, before any weight is read.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

SUPPORTED = "nemotron_h (Nemotron-H dense), qwen3_5 and qwen3_5_text (Qwen3.5 dense, text part)"

_KIND_OF_LETTER = {"M": "Mamba-2", "*": "attention", "-": "MLP"}
_LETTER_OF_NAME = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
_UNBUILT_LETTERS = {"E": "mixture of experts"}
_MTP_LETTERS = "*-"
_LAYER_NAMES = {"attention": "full_attention", "mamba": "linear_attention"}
_DTYPES = ("float32", "bfloat16", "float16")
_FLOAT32_MAX = 3.4028234663852886e38


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one sentence that names the file, key or field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """The multi-token-prediction head that a configuration announces.

    layers: its layers, named as those of the trunk. unsupported: why it cannot be loaded, empty where it can.
    """

    layers: tuple[str, ...]
    unsupported: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig:
    """Sizes and settings of a dense Nemotron-H model.

    `layer_pattern` has one letter a layer: M (Mamba-2), * (attention), - (MLP). `dt_limit` bounds the
    Mamba-2 step size after softplus; it is (0, inf) unless the file says otherwise. Only the convolution may
    carry a bias. `mtp` is None where no multi-token-prediction head is announced.
    """

    vocab_size: int
    hidden_size: int
    layer_pattern: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    d_state: int
    conv_kernel: int
    chunk_size: int
    norm_eps: float
    use_conv_bias: bool = True
    tie_word_embeddings: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    eos_token_ids: tuple[int, ...] = ()
    max_position_embeddings: int = 4096
    param_dtype: str = "float32"
    mtp: MTPConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config:
    """Sizes and settings of the text part of a dense Qwen3.5 model.

    `layer_types` has "linear_attention" (Gated DeltaNet) or "full_attention" for each layer. The first
    `rotary_dim` channels of an attention head rotate, with frequencies rope_theta^(-2i / rotary_dim). `mtp`
    is None where no multi-token-prediction head is announced.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    norm_eps: float
    rope_theta: float
    rotary_dim: int
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    max_position_embeddings: int = 32768
    param_dtype: str = "float32"
    mtp: MTPConfig | None = None


ModelConfig = NemotronHConfig | Qwen35Config


def without_mtp(config: ModelConfig) -> ModelConfig:
    """The configuration of the text model alone."""
    return dataclasses.replace(config, mtp=None)


def parse_config(raw: Mapping, generation: Mapping | None = None) -> ModelConfig:
    """Reads the contents of `config.json` (and of `generation_config.json`, for its stop ids) into a
    configuration.

    Raises CheckpointError naming the field for a family, layer kind, activation, bias, rotary scaling,
    quantisation or value that is not supported.
    """
    family = raw.get("model_type")
    eos = _token_ids(raw.get("eos_token_id"), generation)
    if family == "nemotron_h":
        return _nemotron_h(raw, eos or _token_ids(2 if "eos_token_id" not in raw else None))
    if family in ("qwen3_5", "qwen3_5_text"):
        return _qwen35(raw, eos)
    raise CheckpointError(f"model_type {family!r} is not supported; the supported families are {SUPPORTED}")


def _nemotron_h(raw: Mapping, eos: tuple[int, ...]) -> NemotronHConfig:
    _refuse_quantised(raw)
    raw = {_NEMOTRON_ALIASES.get(key, key): value for key, value in raw.items()}
    _refuse(raw, "use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias", "sliding_window")
    _expect(raw, "mlp_hidden_act", ("relu2",), "relu2")
    _expect(raw, "mamba_hidden_act", ("silu", "swish"), "silu")
    heads = _size(raw, "num_attention_heads", 32)
    config = NemotronHConfig(
        vocab_size=_size(raw, "vocab_size", 131072),
        hidden_size=_size(raw, "hidden_size", 4096),
        layer_pattern=layer_pattern(raw),
        num_attention_heads=heads,
        num_key_value_heads=heads
        if _is_null(raw, "num_key_value_heads")
        else _size(raw, "num_key_value_heads", 8),
        head_dim=_size(raw, "head_dim", 128),
        intermediate_size=_size(raw, "intermediate_size", 21504),
        mamba_num_heads=_size(raw, "mamba_num_heads", 128),
        mamba_head_dim=_size(raw, "mamba_head_dim", 64),
        n_groups=_size(raw, "n_groups", 8),
        d_state=_size(raw, "ssm_state_size", 128),
        conv_kernel=_size(raw, "conv_kernel", 4),
        chunk_size=_size(raw, "chunk_size", 128),
        norm_eps=_number(raw, "layer_norm_epsilon", 1e-5),
        use_conv_bias=_flag(raw, "use_conv_bias", True),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", False),
        dt_limit=dt_limit(raw),
        eos_token_ids=eos,
        max_position_embeddings=_size(raw, "max_position_embeddings", 4096),
        param_dtype=_dtype(raw),
        mtp=_nemotron_h_mtp(raw),
    )
    _divides(config, "num_key_value_heads", "num_attention_heads")
    _divides(config, "n_groups", "mamba_num_heads")
    return config


def _qwen35(raw: Mapping, eos: tuple[int, ...]) -> Qwen35Config:
    text = _typed(raw, "text_config", Mapping, "an object") or raw
    _refuse_quantised(raw)
    _refuse_quantised(text)
    _refuse(text, "attention_bias")
    _expect(text, "hidden_act", ("silu", "swish"), "silu")
    head_dim = _size(text, "head_dim", 256)
    rope_theta, rotary_dim = rope(text, head_dim)
    config = Qwen35Config(
        vocab_size=_size(text, "vocab_size", 248320),
        hidden_size=_size(text, "hidden_size", 4096),
        intermediate_size=_size(text, "intermediate_size", 12288),
        layer_types=layer_types(text),
        num_attention_heads=_size(text, "num_attention_heads", 16),
        num_key_value_heads=_size(text, "num_key_value_heads", 4),
        head_dim=head_dim,
        key_heads=_size(text, "linear_num_key_heads", 16),
        value_heads=_size(text, "linear_num_value_heads", 32),
        key_head_dim=_size(text, "linear_key_head_dim", 128),
        value_head_dim=_size(text, "linear_value_head_dim", 128),
        conv_kernel=_size(text, "linear_conv_kernel_dim", 4),
        norm_eps=_number(text, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rotary_dim=rotary_dim,
        tie_word_embeddings=_flag(
            raw if "tie_word_embeddings" in raw else text, "tie_word_embeddings", False
        ),
        eos_token_ids=_merge(_token_ids(text.get("eos_token_id")), eos),
        max_position_embeddings=_size(text, "max_position_embeddings", 32768),
        param_dtype=_dtype(text if _names_dtype(text) else raw),
        mtp=_qwen35_mtp(text),
    )
    _divides(config, "num_key_value_heads", "num_attention_heads")
    _divides(config, "key_heads", "value_heads")
    return config


def _nemotron_h_mtp(raw: Mapping) -> MTPConfig | None:
    """One head of the letters in `mtp_hybrid_override_pattern` or `mtp_layers_block_type`."""
    count = _count(raw, "num_nextn_predict_layers")
    if not count:
        return None
    key = "mtp_hybrid_override_pattern"
    letters = _typed(raw, key, str, "a string")
    if letters is None:
        key = "mtp_layers_block_type"
        names = _typed(raw, key, list | tuple, "a list") or ("attention", "moe")
        letters = "".join(_letter(key, str(name), i) for i, name in enumerate(names))
    problem = ""
    odd = [letter for letter in letters if letter not in _MTP_LETTERS]
    if count > 1:
        problem = f"num_nextn_predict_layers is {count}; one multi-token-prediction head is supported"
    elif odd or not letters:
        kinds = "; ".join(_where(letter, letters) for letter in dict.fromkeys(odd)) or "no layer"
        problem = f"{key} has {kinds}; a multi-token-prediction head may have * (attention) and - (MLP)"
    return MTPConfig(layers=tuple(letters), unsupported=problem)


def _qwen35_mtp(text: Mapping) -> MTPConfig | None:
    """A head of one full-attention layer, where `mtp_num_hidden_layers` says so."""
    count = _count(text, "mtp_num_hidden_layers")
    if not count:
        return None
    problem = "" if count == 1 else f"mtp_num_hidden_layers is {count}; one layer is supported"
    return MTPConfig(layers=("full_attention",) * count, unsupported=problem)


def layer_pattern(raw: Mapping) -> str:
    """The letters of a Nemotron-H layer map, from `hybrid_override_pattern` or a list of layer names.

    The list stands under `layers_block_type` or `layer_types`, with the names of either transformers
    generation. Maps that disagree with each other or with `num_hidden_layers` are refused: which of them the
    weights follow is unknown.
    """
    maps = {}
    letters = _typed(raw, "hybrid_override_pattern", str, "a string")
    if letters is not None:
        maps["hybrid_override_pattern"] = letters
    for key in ("layers_block_type", "layer_types"):
        names = _typed(raw, key, list | tuple, "a list")
        if names is not None:
            maps[key] = "".join(_letter(key, str(name), i) for i, name in enumerate(names))
    if not maps:
        raise CheckpointError("config.json has neither hybrid_override_pattern nor layers_block_type")
    key, pattern = next(iter(maps.items()))
    for other, value in maps.items():
        if value != pattern:
            raise CheckpointError(
                f"{key} says {pattern!r} and {other} says {value!r}: the layer maps must agree"
            )
    count = raw.get("num_hidden_layers")
    if count is not None and count != len(pattern):
        raise CheckpointError(
            f"{key} has {len(pattern)} layers and num_hidden_layers is {count}: they must agree"
        )
    if not pattern:
        raise CheckpointError(f"{key} is empty: a model needs at least one layer")
    unknown = "; ".join(
        _where(letter, pattern) for letter in dict.fromkeys(pattern) if letter not in _KIND_OF_LETTER
    )
    if unknown:
        built = ", ".join(f"{letter} ({kind})" for letter, kind in _KIND_OF_LETTER.items())
        raise CheckpointError(f"{key} has {unknown} (counted from 0); the supported letters are {built}")
    return pattern


def layer_types(text: Mapping) -> tuple[str, ...]:
    """The layer kinds of a Qwen3.5 model, from `layer_types` or from `full_attention_interval`."""
    given = _typed(text, "layer_types", list | tuple, "a list")
    if given is None:
        interval = _size(text, "full_attention_interval", 4)
        count = _size(text, "num_hidden_layers", 32)
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))
    names = tuple(_LAYER_NAMES.get(str(name), str(name)) for name in given)
    count = text.get("num_hidden_layers")
    if count is not None and count != len(names):
        raise CheckpointError(
            f"layer_types has {len(names)} layers and num_hidden_layers is {count}: they must agree"
        )
    if not names:
        raise CheckpointError("layer_types is empty: a model needs at least one layer")
    for i, name in enumerate(names):
        if name not in ("linear_attention", "full_attention"):
            raise CheckpointError(
                f"layer_types has {name!r} at position {i} (counted from 0); the supported kinds are"
                " linear_attention and full_attention"
            )
    return names


def dt_limit(raw: Mapping) -> tuple[float, float]:
    """The run-time bounds of the Mamba-2 step size, from `time_step_limit` alone; (0, inf) when absent.

    `time_step_min`, `time_step_max` and `time_step_floor` shape the initialisation of dt_bias and bound
    nothing here. An upper bound of null, "inf", Infinity or beyond float32 (1e308) means none.
    """
    limit = raw.get("time_step_limit")
    if limit is None:
        return 0.0, math.inf
    try:
        low, high = (bound["__float__"] if isinstance(bound, Mapping) else bound for bound in limit)
        low = 0.0 if low is None else float(low)
        high = math.inf if high is None else float(high)
    except (TypeError, ValueError, KeyError):
        raise CheckpointError(f"time_step_limit is {limit!r}; it must be a pair of numbers") from None
    if not 0.0 <= low < high:
        raise CheckpointError(
            f"time_step_limit is {limit!r}; it must be an increasing pair of numbers from 0 up"
        )
    return low, math.inf if high > _FLOAT32_MAX else high


def rope(text: Mapping, head_dim: int) -> tuple[float, int]:
    """Base and width of the rotary embedding, from `rope_parameters` (or `rope_scaling`) and the top level.

    A setting in the dictionary wins over the same setting beside it, as in transformers; one that is absent
    or null in both is the family's: theta 10000, factor 0.25. Any rope_type but "default" is refused by
    name.
    """
    settings = {}
    for key in ("rope_scaling", "rope_parameters"):
        settings = _typed(text, key, Mapping, "an object") or settings
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind != "default":
        raise CheckpointError(f"rope_type {kind!r} is not supported; the supported rope_type is 'default'")
    merged = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        found = [source[key] for source in (settings, text) if source.get(key) is not None]
        merged |= {key: found[0]} if found else {}
    theta = _number(merged, "rope_theta", 10000.0)
    factor = _number(merged, "partial_rotary_factor", 0.25)
    width = int(head_dim * factor)
    if width % 2 or not 0 < width <= head_dim:
        raise CheckpointError(
            f"partial_rotary_factor {factor} of head_dim {head_dim} rotates {width} channels; it must be an"
            f" even number from 2 to {head_dim}"
        )
    return theta, width


# Older spellings that the reference class still reads.
_NEMOTRON_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}


def _letter(key: str, name: str, position: int) -> str:
    if name not in _LETTER_OF_NAME:
        known = ", ".join(_LETTER_OF_NAME)
        raise CheckpointError(
            f"{key} has {name!r} at position {position} (counted from 0); known names are {known}"
        )
    return _LETTER_OF_NAME[name]


def _where(letter: str, pattern: str) -> str:
    places = ", ".join(str(i) for i, other in enumerate(pattern) if other == letter)
    kind = f" ({_UNBUILT_LETTERS[letter]}, not supported)" if letter in _UNBUILT_LETTERS else ""
    return f"{letter!r}{kind} at position {places}"


def _typed(raw: Mapping, key: str, kind: Any, words: str) -> Any:
    value = raw.get(key)
    if value is not None and not isinstance(value, kind):
        raise CheckpointError(f"{key} is {value!r}; it must be {words}")
    return value


def _is_null(raw: Mapping, key: str) -> bool:
    return key in raw and raw[key] is None


def _size(raw: Mapping, key: str, default: int) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{key} is {value!r}; it must be a positive integer")
    return value


def _count(raw: Mapping, key: str) -> int:
    return 0 if raw.get(key) in (None, 0) else _size(raw, key, 1)


def _number(raw: Mapping, key: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"{key} is {value!r}; it must be a positive number")
    return float(value)


def _flag(raw: Mapping, key: str, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}; it must be true or false")
    return value


def _names_dtype(raw: Mapping) -> bool:
    return bool(raw.get("dtype") or raw.get("torch_dtype"))


def _dtype(raw: Mapping) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise CheckpointError(f"dtype is {name!r}; it must be one of {', '.join(_DTYPES)}")
    return name


def _refuse_quantised(raw: Mapping) -> None:
    settings = _typed(raw, "quantization_config", Mapping, "an object")
    if settings:
        method = settings.get("quant_method", "unnamed")
        raise CheckpointError(
            f"quantization_config: weights quantised by the method {method!r} are not supported"
        )


def _refuse(raw: Mapping, *keys: str) -> None:
    for key in keys:
        if raw.get(key):
            raise CheckpointError(f"{key} is {raw[key]!r}, which is not supported")


def _expect(raw: Mapping, key: str, supported: Sequence[str], default: str) -> None:
    value = raw.get(key, default)
    if value not in supported:
        raise CheckpointError(
            f"{key} is {value!r}, which is not supported; supported: {', '.join(supported)}"
        )


def _divides(config: ModelConfig, small: str, large: str) -> None:
    a, b = getattr(config, small), getattr(config, large)
    if b % a:
        raise CheckpointError(f"{large} {b} is not a multiple of {small} {a}")


def _token_ids(value, generation: Mapping | None = None) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [value]
    if any(not isinstance(i, int | None) for i in ids):
        raise CheckpointError(f"eos_token_id is {value!r}; it must be a token id or a list of them")
    own = tuple(i for i in ids if i is not None)
    return _merge(own, _token_ids(generation.get("eos_token_id")) if generation else ())


def _merge(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*first, *second)))

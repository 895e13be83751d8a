"""Which backend serves a cache, and the calls into the GPU kernels."""

import dataclasses
import functools
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import gate_value
from pallas_kernels.parts import AttentionParts, Gate, Part
from replayssm_jax.buckets import PREFILL_CHUNK
from replayssm_jax.config import DEFAULT_REPLAY, DecodingConfig, EagerConfig, ReplayConfig
from replayssm_jax.precision import Stored, format_of

logger = logging.getLogger(__name__)

KERNELS = {"mamba2": "pallas_kernels.mamba2", "gated_delta": "pallas_kernels.gated_delta"}
_logged: set[str] = set()


def resolve(
    method: DecodingConfig, specs: Sequence[Any], batch: int, dtype: Any = jnp.bfloat16
) -> DecodingConfig:
    """The same configuration with the backend that will serve it: "xla" or "pallas".

    specs: a model's layer specs. dtype: of its activations. "auto" takes the kernels where they can serve
    every recurrent layer, else the portable backend, and logs each reason once. Raises ValueError when
    "pallas" is asked for and cannot be served.
    """
    if method.implementation == "xla":
        return method
    reason = device_refusal() or format_refusal(method, dtype) or size_refusal(method, specs, batch)
    if reason is None:
        return dataclasses.replace(method, implementation="pallas")
    if method.implementation == "pallas":
        raise ValueError(f'implementation="pallas" cannot be served: {reason}.')
    if reason not in _logged:
        _logged.add(reason)
        logger.info("decoding with the portable backend: %s", reason)
    return dataclasses.replace(method, implementation="xla")


def default_method(model: Any, rows: int) -> DecodingConfig:
    """The method that decodes so many rows soonest, one token a step, where nobody says which.

    Replay, but on a GPU the eager kernels for so few rows that there is little state to read.
    """
    if device_refusal() is not None:
        return DEFAULT_REPLAY
    specs = [spec for spec in model.cache_specs() if hasattr(spec, "recurrence")]
    if not specs or size_refusal(EagerConfig(), specs, rows) is not None:
        return DEFAULT_REPLAY
    return EagerConfig() if all(eager_is_sooner(spec, rows) for spec in specs) else DEFAULT_REPLAY


def prefill_tokens() -> int:
    """Tokens up to which prompts share a prefill call on the default device: 1 where each has its own.

    A GPU has read all weights for every call, and takes a few hundred tokens in the time of sixteen. A CPU is
    busy with the products of one short prompt.
    """
    return 1 if _default_device().platform == "cpu" else PREFILL_CHUNK


def eager_is_sooner(spec: Any, rows: int) -> bool:
    """Whether an eager step of a layer (heads, head_dim) takes less time than a replay
    step.

    Measured on one H200 at 1 to 16 rows (`bench.kernel_decode`): the methods cross between 512 and 960 tiles
    of 64 state rows.
    """
    return rows * spec.heads * spec.head_dim // 64 < 800


def device_refusal() -> str | None:
    """Why the GPU kernels cannot serve here, with this JAX on the default device; None when they can."""
    from pallas_kernels import launch

    try:
        launch.require_jax()
    except launch.Unsupported as error:
        return str(error)
    device = _default_device()
    if device.platform != "gpu":
        return f"the Pallas kernels need a GPU, and the default device is a {device.platform}"
    capability = str(getattr(device, "compute_capability", "0.0"))
    if float(capability) < 9.0:
        return f"the Pallas kernels need a Hopper GPU or newer, this one has compute capability {capability}"
    return None


def _formats(method: DecodingConfig) -> Any:
    """The kernels' formats of a configuration whose state is not float32 alone, else None."""
    from pallas_kernels.rewrite import Formats

    if not isinstance(method, ReplayConfig) or (method.recurrence, method.read) == ("fp32", "fp32"):
        return None
    read = None if method.read == method.recurrence else method.read
    return Formats(method.recurrence, read, method.rounding == "stochastic")


def format_refusal(method: DecodingConfig, dtype: Any = jnp.bfloat16) -> str | None:
    """Why the GPU kernels cannot serve the state's formats with activations of `dtype`; None when they
    can."""
    from pallas_kernels import launch

    formats = _formats(method)
    if formats is None:
        return None
    try:
        formats.check()
    except launch.Unsupported as error:
        return str(error)
    if isinstance(method, ReplayConfig) and method.skip_forgotten != "off":
        return "the kernels skip reads of forgotten heads with a state in fp32 only"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernels serve states below fp32 with bfloat16 activations, not with {jnp.dtype(dtype)}"
    return None


def _default_device() -> Any:
    """Where new arrays go: the first device, unless `jax.default_device` says otherwise."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def size_refusal(method: DecodingConfig, specs: Sequence[Any], batch: int) -> str | None:
    """Why the GPU kernels cannot serve these sizes; None when they can."""
    from pallas_kernels import launch
    from pallas_kernels.pipeline import Geometry

    slots, formats = ring_slots(dataclasses.replace(method, implementation="pallas")), _formats(method)
    for spec in specs:
        name = getattr(spec, "recurrence", None)
        if name is None:
            continue
        if name not in KERNELS:
            return f"there are no Pallas kernels for {name}"
        geometry = Geometry(batch, spec.groups, spec.heads, spec.head_dim, spec.d_state, slots, method.window)
        try:
            importlib.import_module(KERNELS[name]).KERNELS.check(geometry)
            if formats is not None:
                formats.check_sizes(geometry)
        except launch.Unsupported as error:
            return str(error)
    return None


def ring_slots(method: DecodingConfig) -> int:
    """R: slots of a ring, at least buffer_length + window; the GPU kernels read a multiple of 8."""
    granule = 8 if method.implementation == "pallas" else 1
    return -(-(method.buffer_length + method.window) // granule) * granule


def row_plan(method: DecodingConfig, fold: jax.Array, start: jax.Array, length: jax.Array) -> Any:
    """Which rows rewrite their state in a step, for the kernels of all layers; None for the portable backend.

    fold: int32 [B], committed tokens that a row folds first; every row of an eager cache rewrites its state.
    start, length: int32 [B], before the fold.
    """
    if method.implementation != "pallas":
        return None
    from pallas_kernels import launch

    rewrites = fold > 0 if isinstance(method, ReplayConfig) else jnp.ones_like(fold, dtype=bool)
    return launch.plan(rewrites, start, length)


def constants_of(heads: Any) -> jax.Array | None:
    """A recurrence's per-head constants in one array, float32 [n, H], as the kernels read them; None without
    any."""
    leaves = jax.tree.leaves(heads)
    return jnp.stack(leaves) if leaves else None


def kernel_step(
    recurrence: str,
    state: jax.Array,
    ring: Any,
    inputs: Any,
    reader: jax.Array,
    constants: jax.Array | None,
    plan: Any,
    forgotten: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """One layer's step by the GPU kernels, in place: (outputs, checkpoint or state, ring).

    Arguments as for `recur`; ring: without the new tokens, None for an eager step; constants: from
    `constants_of`; plan: from `row_plan`; forgotten: bool [B, H], heads whose checkpoint is taken for zero,
    None to read all.
    """
    return _kernel_step(state, ring, inputs, reader, constants, plan, forgotten, recurrence=recurrence)


def stored_kernel_step(
    recurrence: str,
    checkpoint: Stored,
    copy: Stored | None,
    ring: Any,
    inputs: Any,
    reader: jax.Array,
    constants: jax.Array | None,
    plan: Any,
    words: jax.Array | None,
) -> tuple[jax.Array, Stored, Stored | None, Any]:
    """`kernel_step` of a checkpoint or a copy below float32: (outputs, checkpoint, copy, ring).

    words: from `flush.kernel_words`, None for rounding to nearest.
    """
    return _stored_kernel_step(
        checkpoint, copy, ring, inputs, reader, constants, plan, words, recurrence=recurrence
    )


@functools.partial(jax.jit, static_argnames="recurrence")
def _stored_kernel_step(checkpoint, copy, ring, inputs, reader, constants, plan, words, *, recurrence: str):
    from pallas_kernels.rewrite import Formats

    kernels = importlib.import_module(KERNELS[recurrence]).KERNELS
    formats = Formats(format_of(checkpoint), None if copy is None else format_of(copy), words is not None)
    kept = tuple(jax.tree.leaves(checkpoint)), None if copy is None else tuple(jax.tree.leaves(copy))
    fields, new = tuple(jax.tree.leaves(ring)), tuple(jax.tree.leaves(inputs))
    outputs, *kept, fields = kernels.stored_step(*kept, fields, new, reader, constants, plan, formats, words)
    stored = [
        jax.tree.unflatten(jax.tree.structure(old), new or ())
        for old, new in zip((checkpoint, copy), kept, strict=True)
    ]
    return outputs, *stored, jax.tree.unflatten(jax.tree.structure(ring), fields)


def _step(state, ring, inputs, reader, constants, plan, forgotten, *, recurrence: str):
    kernels = importlib.import_module(KERNELS[recurrence])
    new = tuple(jax.tree.leaves(inputs))
    if ring is None:
        return *kernels.eager(state, new, reader, constants, plan=plan), None
    old = tuple(jax.tree.leaves(ring))
    outputs, state, slots = kernels.step(state, old, new, reader, constants, plan, forgotten=forgotten)
    return outputs, state, jax.tree.unflatten(jax.tree.structure(ring), slots)


def kernel_attention(q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array) -> jax.Array | None:
    """A step's attention by its GPU kernel; None where it cannot serve.

    q: [B, T, Nq, D]. k, v: [B, N, S, D] with the step's tokens; position: int32 [B], before the step.
    """
    from pallas_kernels import attention

    _, groups, columns, width = k.shape
    rows = q.shape[1] * q.shape[2] // groups
    if not _serves(attention.check, rows, width, columns, q.dtype):
        return None
    return _kernel_attention(q, k, v, position)


def kernel_attention_inputs(
    projected: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None,
    turns: tuple[jax.Array, jax.Array] | None,
    parts: AttentionParts,
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Queries, and keys and values with a step's own, by their GPU kernel, arguments as
    `pallas_kernels.attention_inputs` has them; None where it cannot serve."""
    from pallas_kernels import attention_inputs

    if not _serves(attention_inputs.check, parts, projected.dtype):
        return None
    return _kernel_attention_inputs(projected, k, v, position, norms, turns, parts=parts)


def kernel_convolution(
    window: jax.Array,
    projected: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    position: jax.Array,
    parts: tuple[Part, ...],
    offset: int,
    gates: tuple[Gate, ...],
    constants: tuple[tuple[jax.Array, ...], ...],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array] | None:
    """A step's convolution by its GPU kernel, arguments and results as `pallas_kernels.convolution` has them;
    None where it cannot serve."""
    from pallas_kernels import convolution

    sizes = parts, projected.dtype, projected.shape[1]
    if not _serves(convolution.check, *sizes):
        return None
    operands = window, projected, weight, bias, position
    if _serves(convolution.check, *sizes, gates):
        return _kernel_convolution(*operands, constants, parts=parts, offset=offset, gates=gates)
    outputs, _, window = _kernel_convolution(*operands, (), parts=parts, offset=offset, gates=())
    return outputs, gate_values(projected, gates, constants), window


def gate_values(
    projected: jax.Array, gates: Sequence[Gate], constants: Sequence[Sequence[jax.Array]]
) -> tuple[jax.Array, ...]:
    """Gates, float32 [B, T, H], of a projection [B, T, P], with the heads' constants of each."""
    return tuple(
        gate_value(gate, projected[..., gate.first : gate.first + gate.heads], arrays)
        for gate, arrays in zip(gates, constants, strict=True)
    )


def kernel_gated_norm(
    y: jax.Array, projected: jax.Array, weight: jax.Array, groups: int, eps: float
) -> jax.Array | None:
    """Mamba-2's output norm by its GPU kernel, arguments as `pallas_kernels.gated_norm` has them; None where
    it cannot serve."""
    from pallas_kernels import gated_norm

    if not _serves(gated_norm.check, y.shape[-1], groups, projected.dtype):
        return None
    return _kernel_gated_norm(y, projected, weight, groups=groups, eps=eps)


def kernel_product(
    x: jax.Array, matrix: jax.Array, activation: str | None = None, summed: bool = True
) -> jax.Array | None:
    """A few rows' product with a matrix by its GPU kernel; None where it cannot serve.

    x: [*rows, K]; matrix: [K, N]; activation: as `pallas_kernels.products` has it. Returns [*rows, N] in the
    dtype of x, or where `summed` is False float32 parts [S, rows, N] that are to be added.
    """
    from pallas_kernels import products

    rows = math.prod(x.shape[:-1])
    if not _serves(products.check, rows, *matrix.shape, x.dtype, activation):
        return None
    parts = None if summed else products.parts_of(*matrix.shape)
    result = _kernel_product(x.reshape(rows, -1), matrix, activation=activation, parts=parts)
    return result.reshape(*x.shape[:-1], -1) if summed else result


def split_product(x: jax.Array, matrix: jax.Array) -> jax.Array | None:
    """A product of more rows in parts over its inputs, float32 [S, rows, N] to be added, where so few tiles
    would leave half of a GPU idle; None where they do not, or where no kernel adds them."""
    from pallas_kernels import residual_norm

    (inputs, outputs), rows = matrix.shape, math.prod(x.shape[:-1])
    count = product_split(rows, inputs, outputs)
    if count == 1 or not _serves(residual_norm.check, outputs, x.dtype):
        return None
    left, right = x.reshape(rows, count, -1), matrix.reshape(count, -1, outputs)
    numbers = (((2,), (1,)), ((1,), (0,)))
    return jax.lax.dot_general(left, right, numbers, preferred_element_type=jnp.float32)


def product_split(rows: int, inputs: int, outputs: int) -> int:
    """Parts of a product of so many rows, three at most: no more tiles of 128 x 128 than multiprocessors.

    Measured on one H200 at 64 to 512 rows (bench/NOTES.md, "Products of a step").
    """
    tiles = -(-rows // 128) * -(-outputs // 128)
    counts = [n for n in (1, 2, 3) if inputs % (64 * n) == 0 and n * tiles <= 132]
    return max(counts, default=1)


def kernel_residual_norm(
    x: jax.Array, parts: jax.Array, weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array] | None:
    """x [*rows, D] + the sum of parts [S, rows, D], and its RMS norm, by their GPU kernel; None where it
    cannot serve."""
    from pallas_kernels import residual_norm

    if not _serves(residual_norm.check, x.shape[-1], x.dtype):
        return None
    sums, normed = _kernel_residual_norm(x.reshape(-1, x.shape[-1]), parts, weight, eps=eps, offset=offset)
    return sums.reshape(x.shape), normed.reshape(x.shape)


def _serves(check: Callable[..., None], *sizes: Any) -> bool:
    from pallas_kernels import launch

    try:
        check(*sizes)
    except launch.Unsupported:
        return False
    return True


def _attention(q, k, v, position):
    from pallas_kernels import attention

    return attention.attend(q, k, v, position)


def _attention_inputs(projected, k, v, position, norms, turns, *, parts):
    from pallas_kernels import attention_inputs

    return attention_inputs.take_in(projected, k, v, position, norms, turns, parts=parts)


def _convolution(window, projected, weight, bias, position, constants, *, parts, offset, gates):
    from pallas_kernels import convolution

    options: dict[str, Any] = {"offset": offset, "gates": gates, "constants": constants}
    return convolution.convolve(window, projected, weight, bias, position, parts, **options)


def _gated_norm(y, projected, weight, *, groups, eps):
    from pallas_kernels import gated_norm

    return gated_norm.gate_then_norm(y, projected, weight, groups=groups, eps=eps)


def _product(x, matrix, *, activation, parts):
    from pallas_kernels import products

    return products.multiply(x, matrix, activation=activation, parts=parts)


def _residual_norm(x, parts, weight, *, eps, offset):
    from pallas_kernels import residual_norm

    return residual_norm.add_then_norm(x, parts, weight, eps=eps, offset=offset)


# One inner program a layer kind: its kernels are traced and lowered once, however many layers use them.
_kernel_step = jax.jit(_step, static_argnames="recurrence")
_kernel_attention = jax.jit(_attention)
_kernel_attention_inputs = jax.jit(_attention_inputs, static_argnames="parts")
_kernel_convolution = jax.jit(_convolution, static_argnames=("parts", "offset", "gates"))
_kernel_gated_norm = jax.jit(_gated_norm, static_argnames=("groups", "eps"))
_kernel_product = jax.jit(_product, static_argnames=("activation", "parts"))
_kernel_residual_norm = jax.jit(_residual_norm, static_argnames=("eps", "offset"))

"""Low-precision formats of a state, and the conversions from and to float32.

fp32, bf16 and fp16 are plain arrays. fp8_e4m3 has one float32 scale a value row, nvfp4 also one E4M3 scale
for every 16 elements of the contracted axis (the last block may be short): no scale depends on other rows of
the batch. Float32 scales are powers of two, so `decode` is exact, and a reader may multiply by them in any
order. Finite numbers never become NaN or infinite; inputs below 2^-126 count as zero. Infinities stay
infinite in bf16 and fp16 and become NaN in fp8_e4m3; in nvfp4 they, like NaN, make their block NaN.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt8, UInt32

from pallas_kernels import numerics

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8_e4m3": 8, "nvfp4": 4}
FORMATS = tuple(BITS)
BLOCK = 16
_NARROW = {
    "bf16": (numerics.BFLOAT16, jnp.bfloat16),
    "fp16": (numerics.FLOAT16, jnp.float16),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """Codes with their scales.

    codes: E4M3 uint8 [..., K], or two E2M1 nibbles a byte [..., K/2], the even element in the low nibble.
    scale: float32 [...]. block_scale: E4M3 codes [..., ceil(K / 16)] of nvfp4, else None. lanes: the bits of
    E2M1 codes are in the order in which the GPU kernels read them (`numerics.to_lane_order`).
    """

    codes: UInt8[Array, "..."]
    scale: Float32[Array, "..."]
    block_scale: UInt8[Array, "..."] | None
    format: str = field(metadata={"static": True})
    lanes: bool = field(default=False, metadata={"static": True})


Stored = Array | Scaled


def check_format(name: str, format: str) -> None:
    """Raises ValueError when the option `name` is not one of `FORMATS`."""
    if format not in FORMATS:
        raise ValueError(f"{name} must be one of {', '.join(FORMATS)}, got {format!r}.")


def row_random(
    seed: UInt32[Array, " B"],
    layer: Int32[Array, " B"] | int,
    start: Int32[Array, " B"],
    shape: tuple[int, ...],
    first: Int32[Array, ""] | int = 0,
) -> UInt32[Array, "B ..."]:
    """The random words of a row's stochastic rounding, uint32 [B, *shape].

    seed: of the row. layer: index of the layer in the model. start: tokens in the state that is rounded.
    first: place in the row's whole state of the first element of `shape`, where a device holds a part. A word
    depends on these and on the place of its element alone: not on the batch or the backend.
    """
    row = (-1,) + (1,) * len(shape)
    size = 1
    for axis in shape:
        size *= axis
    element = jnp.asarray(first).astype(jnp.uint32) + jnp.arange(size, dtype=jnp.uint32).reshape(1, *shape)
    return numerics.hash_on(row_words(seed, layer, start).reshape(row), element)


def row_words(
    seed: UInt32[Array, " B"], layer: Int32[Array, " B"] | int, start: Int32[Array, " B"]
) -> UInt32[Array, " B"]:
    """The hash of all that the random words of a row share."""
    return numerics.hash_uint32(seed, layer, start)


def encode(x: Float32[Array, "... K"], format: str, random: UInt32[Array, "... K"] | None = None) -> Stored:
    """`x` in a format of `FORMATS`, rounded to nearest even, or stochastically with uniform words `random`.

    The same words and float32 input give the same bits on every backend. Raises ValueError for nvfp4 with an
    odd K.
    """
    if format == "fp32":
        return x
    if format in _NARROW:
        narrow, dtype = _NARROW[format]
        codes = numerics.encode_float(x, narrow, random).astype(jnp.uint16)
        return jax.lax.bitcast_convert_type(codes, dtype)
    if format == "fp8_e4m3":
        return _encode_e4m3(x, random)
    return _encode_nvfp4(x, random)


def _encode_e4m3(x: Float32[Array, "... K"], random: UInt32[Array, "... K"] | None) -> Scaled:
    x = numerics.bounded(x, numerics.E4M3_BOUND)
    largest = jnp.max(numerics.finite_magnitude(x), axis=-1, keepdims=True)
    scale, inverse = numerics.power_of_two_scale(largest, numerics.E4M3_MAX, numerics.SMALLEST_E4M3)
    scaled = x * jnp.broadcast_to(inverse, x.shape)
    codes = numerics.encode_float(scaled, numerics.E4M3, random).astype(jnp.uint8)
    return Scaled(codes=codes, scale=scale[..., 0], block_scale=None, format="fp8_e4m3")


def _in_blocks(x: Array) -> Array:
    """[..., K] as [..., blocks, 16], zeros behind."""
    *rows, k = x.shape
    padded = jnp.pad(x, [(0, 0)] * len(rows) + [(0, -k % BLOCK)])
    return padded.reshape(*rows, -1, BLOCK)


def _encode_nvfp4(x: Float32[Array, "... K"], random: UInt32[Array, "... K"] | None) -> Scaled:
    *rows, k = x.shape
    if k % 2:
        raise ValueError(f"nvfp4 packs two elements a byte and needs an even d_state, got {k}.")
    x = numerics.bounded(x, numerics.NVFP4_BOUND)
    largest = jnp.max(numerics.finite_magnitude(x), axis=-1, keepdims=True)
    limit = numerics.E2M1_MAX * numerics.E4M3_MAX
    smallest = numerics.SMALLEST_E2M1 + numerics.SMALLEST_E4M3
    scale, inverse = numerics.power_of_two_scale(largest, limit, smallest)
    scaled = _in_blocks(x * jnp.broadcast_to(inverse, x.shape))
    block = jnp.max(numerics.finite_magnitude(scaled), axis=-1, keepdims=True)
    broken = jnp.any(numerics.not_finite(scaled), axis=-1, keepdims=True)
    block_code = jnp.where(broken, jnp.uint32(numerics.E4M3.nan), numerics.encode_block_scale(block))
    words = None if random is None else _in_blocks(random)
    codes = numerics.encode_e2m1(scaled, numerics.decode_e4m3(block_code), words)
    packed = numerics.pack_nibbles(codes.reshape(*rows, -1)[..., :k])
    return Scaled(
        codes=packed, scale=scale[..., 0], block_scale=block_code[..., 0].astype(jnp.uint8), format="nvfp4"
    )


def decode(stored: Stored) -> Float32[Array, "... K"]:
    """The float32 values of what `encode` returned; exact."""
    if not isinstance(stored, Scaled):
        return stored if stored.dtype == jnp.float32 else stored.astype(jnp.float32)
    if stored.format == "fp8_e4m3":
        values = numerics.decode_e4m3(stored.codes.astype(jnp.uint32))
        return values * jnp.broadcast_to(stored.scale[..., None], values.shape)
    stored = in_order(stored, lanes=False)
    assert stored.block_scale is not None
    values = numerics.decode_e2m1(numerics.unpack_nibbles(stored.codes).astype(jnp.uint32))
    blocks = numerics.decode_e4m3(stored.block_scale.astype(jnp.uint32))
    scales = jnp.repeat(blocks, BLOCK, axis=-1)[..., : values.shape[-1]]
    return values * scales * jnp.broadcast_to(stored.scale[..., None], values.shape)


def in_order(stored: Scaled, *, lanes: bool) -> Scaled:
    """The same codes with their bits in the order of the GPU kernels' lanes, or in that of `encode`."""
    if stored.lanes == lanes or stored.format != "nvfp4":
        return stored
    order = numerics.to_lane_order if lanes else numerics.from_lane_order
    return replace(stored, codes=order(stored.codes), lanes=lanes)


def encode_like(x: Float32[Array, "... K"], stored: Stored, random: UInt32[Array, "... K"] | None = None):
    """`encode` in the format of `stored`, with its order of bits."""
    new = encode(x, format_of(stored), random)
    if not isinstance(new, Scaled) or not isinstance(stored, Scaled):
        return new
    return in_order(new, lanes=stored.lanes)


def zeros(shape: tuple[int, ...], format: str) -> Stored:
    """Zeros of a format, as `encode` makes of float32 zeros, in buffers of their own."""
    shapes = jax.eval_shape(lambda: encode(jnp.zeros(shape, jnp.float32), format))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def format_of(stored: Stored) -> str:
    """The format that `encode` was given."""
    if isinstance(stored, Scaled):
        return stored.format
    return {dtype: name for name, (_, dtype) in _NARROW.items()}.get(stored.dtype.type, "fp32")

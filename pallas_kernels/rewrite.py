"""What a flush stores: a tile of the new checkpoint and of its copy for reads, in any of the formats.

The codes are those of `numerics`, bit for bit as the portable backend makes them of the same float32 state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics
from pallas_kernels.launch import TILE, Unsupported
from pallas_kernels.pipeline import Geometry

BLOCK = 16
_NARROW = {"bf16": (numerics.BFLOAT16, jnp.bfloat16), "fp16": (numerics.FLOAT16, jnp.float16)}
RECURRENCES = ("fp32", "bf16", "fp16", "fp8_e4m3")
READS = ("bf16", "fp16", "fp8_e4m3", "nvfp4")


@dataclasses.dataclass(frozen=True)
class Formats:
    """Formats of checkpoint and copy (None: outputs read the checkpoint), and whether the checkpoint is
    rounded stochastically."""

    recurrence: str = "fp32"
    read: str | None = None
    stochastic: bool = False

    @property
    def read_bits(self) -> int:
        """Bits of an element that outputs read."""
        return {"fp32": 32, "fp8_e4m3": 8, "nvfp4": 4}.get(self.read or self.recurrence, 16)

    def check(self) -> None:
        """Raise `Unsupported` on formats that the kernels cannot serve."""
        if self.recurrence not in RECURRENCES:
            raise Unsupported(f"the kernels keep no checkpoint in {self.recurrence}")
        if self.read is not None and self.read not in READS:
            raise Unsupported(f"the kernels read no copy in {self.read}")

    def check_sizes(self, geometry: Geometry) -> None:
        """Raise `Unsupported` on sizes that the kernels cannot serve in these formats."""
        if geometry.head_dim % BLOCK:
            raise Unsupported(
                f"states below fp32 need a head_dim that is a multiple of {BLOCK}, got {geometry.head_dim}"
            )


FLOAT32 = Formats()


def by_tiles(format: str, parts: tuple, tiles: int) -> tuple:
    """Views of a stored state, [B, H, V, ...] each, by tiles of 64 rows as the kernels copy and write
    them."""
    shape = (TILE, -1) if format != "nvfp4" else (-1, 256)
    views = (shape, (TILE,), (-1, 256))
    return tuple(part.reshape(tiles, *view) for part, view in zip(parts, views, strict=False))


def decoded(tile: jax.Array, scale: jax.Array | None) -> jax.Array:
    """A tile of a checkpoint as float32; scale: [64] of E4M3 codes."""
    if scale is None:
        return tile.astype(jnp.float32)
    values = numerics.decode_e4m3(tile.astype(jnp.uint32))
    return values * lax.broadcast_in_dim(scale, values.shape, (0,))


@dataclasses.dataclass(frozen=True)
class Writer:
    """Encodes and stores tiles; layout: `blocks.block_layout`. fused: compiled, not interpreted."""

    plgpu: Any
    layout: Any
    d_state: int
    fused: bool

    def random(self, hashed: jax.Array, first: jax.Array) -> Any:
        """Uniform words uint32 [64, K] of a tile whose first element has the place `first` in its row;
        hashed: the words before. The lanes of a compiled kernel make them of these two."""
        if self.fused:
            return hashed.astype(jnp.int32), first
        shape = (TILE, self.d_state)
        row, column = (
            self.plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.layout) for axis in range(2)
        )
        return numerics.hash_on(hashed, first + row * self.d_state + column)

    def rewritten(self, formats: Formats, x: jax.Array, random: Any) -> tuple[list, jax.Array]:
        """What a flush stores of a tile in float32, format and parts each: the checkpoint, then the copy; and
        the checkpoint's value."""
        parts, kept = self.encoded(formats.recurrence, x, random)
        stored = [(formats.recurrence, parts)]
        if formats.read is not None:
            stored.append((formats.read, self.encoded(formats.read, kept)[0]))
        return stored, kept

    def write(self, stored: list, refs: tuple, place: jax.Array) -> None:
        """Stores what `rewritten` made as tile `place`; references as in its list."""
        for (format, parts), kept in zip(stored, refs, strict=False):
            self.put(format, parts, kept, place)

    def encoded(self, format: str, x: jax.Array, random: Any = None) -> tuple[tuple, Any]:
        """What is stored of a tile in float32, and its value, float32 (None for nvfp4)."""
        if format == "fp32":
            return (x,), x
        if format == "nvfp4" and self.fused:
            return (x,), None
        if self.fused and (format == "fp8_e4m3" or random is not None):
            *parts, kept = self._encoded_by_lanes(format, x, random)
            return tuple(parts), kept
        if format in _NARROW:
            narrow, dtype = _NARROW[format]
            codes = numerics.encode_float(x, narrow, random).astype(jnp.uint16)
            stored = lax.bitcast_convert_type(codes, dtype)
            return (stored,), stored.astype(jnp.float32)
        fp8 = format == "fp8_e4m3"
        x = numerics.bounded(x, numerics.E4M3_BOUND if fp8 else numerics.NVFP4_BOUND)
        largest = jnp.max(numerics.finite_magnitude(x), axis=1)
        limit = numerics.E4M3_MAX if fp8 else numerics.E2M1_MAX * numerics.E4M3_MAX
        smallest = numerics.SMALLEST_E4M3 + (0 if fp8 else numerics.SMALLEST_E2M1)
        scale, inverse = numerics.power_of_two_scale(largest, limit, smallest)
        scaled = x * self._wide(inverse)
        if fp8:
            codes = numerics.encode_float(scaled, numerics.E4M3, random)
            return (codes.astype(jnp.uint8), scale), numerics.decode_e4m3(codes) * self._wide(scale)
        blocks = scaled.reshape(TILE, -1, BLOCK)
        block = numerics.encode_block_scale(jnp.max(numerics.finite_magnitude(blocks), axis=2))
        broken = jnp.any(numerics.not_finite(blocks), axis=2)
        block = jnp.where(broken, jnp.uint32(numerics.E4M3.nan), block)
        codes = numerics.encode_e2m1(blocks, numerics.decode_e4m3(block)[:, :, None])
        return (codes.reshape(x.shape), scale, block), None

    def put(self, format: str, parts: tuple, refs: tuple, place: jax.Array) -> None:
        """Stores what `encoded` made as tile `place` of arrays of tiles."""
        if format != "nvfp4":
            for ref, part in zip(refs, parts, strict=True):
                ref[place] = part
            return
        if self.fused:
            self._write_nvfp4(parts[0], tuple(ref.at[place] for ref in refs))
            return
        codes, scale, block = parts
        refs[1][place] = scale
        packed = numerics.to_lane_order(numerics.pack_nibbles(codes))
        refs[0][place] = packed.reshape(refs[0].shape[1:])
        refs[2][place] = block.astype(jnp.uint8).reshape(refs[2].shape[1:])

    def _wide(self, rows: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(rows, (TILE, self.d_state), (0,))

    def _encoded_by_lanes(self, format: str, x: jax.Array, random: tuple | None) -> tuple:
        """The arrays that are stored, and their value."""
        from jax.experimental.mosaic.gpu import FragmentedArray, utils
        from jaxlib.mlir import ir

        from pallas_kernels.code_lanes import CodeLanes
        from pallas_kernels.encoding import Words, encode_rows
        from pallas_kernels.lanes import first_element, repack, unpack

        plgpu, scaled = self.plgpu, format == "fp8_e4m3"
        to, dtype = (numerics.E4M3, jnp.uint8) if scaled else _NARROW[format]
        rows, scalar = self.layout.reduce(1), plgpu.Layout.WGMMA
        empty = lax.broadcast_in_dim(jnp.float32(0), (TILE,), ())
        kinds = {
            "codes": plgpu.ShapeDtypeStruct(x.shape, dtype, layout=self.layout),
            "kept": plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=self.layout),
        }
        if scaled:
            kinds["scale"] = plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=rows)
        given = () if random is None else random

        @plgpu.inline_mgpu(
            arg_types=(self.layout, rows, (scalar,) * len(given)), return_type=tuple(kinds.values())
        )
        def encode(_, x, empty, given):
            words = Words(*map(first_element, given)) if given else None
            fours = unpack(x.registers.flat)
            codes, values, scales = encode_rows(CodeLanes(), fours, self.d_state, to, words)
            element = utils.dtype_to_ir_type(dtype)
            stored, kept, scale = x.registers.copy(), x.registers.copy(), empty.registers.copy()
            vector = ir.VectorType.get((4,), element)
            stored.flat[:] = [utils.bitcast(one, vector) for one in repack(codes)]
            kept.flat[:] = repack(values)
            results = [
                FragmentedArray(_registers=stored, _layout=x.layout, _is_signed=False if scaled else None),
                FragmentedArray(_registers=kept, _layout=x.layout, _is_signed=None),
            ]
            if scaled:
                kind = scale.flat[0].type
                whole = isinstance(kind, ir.VectorType)
                scale.flat[:] = repack([[x] for x in scales]) if whole else [x.raw for x in scales]
                results.append(FragmentedArray(_registers=scale, _layout=empty.layout, _is_signed=None))
            return tuple(results)

        codes, kept, *scale = encode(x, plgpu.layout_cast(empty, rows), given)
        return codes, *scale, kept

    def _write_nvfp4(self, x: jax.Array, refs: tuple) -> None:
        from pallas_kernels.code_lanes import CodeLanes
        from pallas_kernels.encoding import write_nvfp4
        from pallas_kernels.lanes import unpack

        ref = self.plgpu.RefType()

        @self.plgpu.inline_mgpu(arg_types=(self.layout, (ref,) * 3))
        def write(_, x, refs):
            write_nvfp4(CodeLanes(), unpack(x.registers.flat), *refs)

        write(x, refs)

"""The short causal convolution of a step's tokens: from a projection's channels to a recurrence's inputs.

One pass reads the last columns of each row's window and the new ones, writes the new ones into the window,
and the outputs by group, normalised where the recurrence wants them so. A CTA a row makes the heads' gates.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Unsupported, mosaic_gpu, require_jax
from pallas_kernels.numerics import gate_value, series_log1p
from pallas_kernels.parts import Gate, Part
from pallas_kernels.pipeline import tiled_layout

# Channels of a CTA, four a thread; a warp has the 128 of a normalised vector.
CHUNK = 512
_LANES = 128
_TILE = 64
_HEADS = 32
# Rows of a CTA where there are many, and how many are.
_ROWS, _MANY_ROWS = 2, 64


def check(parts: Sequence[Part], dtype: Any, tokens: int, gates: Sequence[Gate] = ()) -> None:
    """Raise `Unsupported`, with the reason, on what the kernel cannot serve."""
    require_jax()
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise Unsupported(f"activations must be bfloat16 or float16, got {jnp.dtype(dtype).name}")
    if not 1 <= tokens <= 8:
        raise Unsupported(f"the window must have 1 to 8 tokens, got {tokens}")
    for part in parts:
        if part.channels % CHUNK or part.width % _TILE:
            raise Unsupported(
                f"channels of a part must be a multiple of {CHUNK} and of {_TILE} a group, "
                f"got {part.groups} x {part.width}"
            )
        if part.scale is not None and part.width != _LANES:
            raise Unsupported(f"normalised vectors must have {_LANES} channels, got {part.width}")

    for gate in gates:
        if gate.heads % _HEADS:
            raise Unsupported(f"gates must have a multiple of {_HEADS} heads, got {gate.heads}")


def convolve(
    window: jax.Array,
    projected: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    position: jax.Array,
    parts: Sequence[Part],
    *,
    offset: int = 0,
    gates: Sequence[Gate] = (),
    constants: Sequence[Sequence[jax.Array]] = (),
    rows: int | None = None,
    interpret: Any = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array]:
    """silu(convolution) of T tokens, part by part [B, G, T, width] in the projection's dtype; the gates,
    float32 [B, T, H]; and the window.

    window: [B, W, C] input columns, position p in column p mod W, W >= taps - 1 + T; written in place where
    the caller donates it. projected: [B, T, P], whose channels from `offset` on are the C new ones. weight:
    [taps, C], oldest tap first; bias: [C]. position: int32 [B], tokens of a row before these. gates: of other
    channels of `projected`; constants: float32 [H] of every gate. rows: that a CTA takes, a divisor of B;
    None: several where there are many.
    """
    plgpu, dtype = mosaic_gpu(), projected.dtype
    (batch, columns, channels), tokens, taps = window.shape, projected.shape[1], weight.shape[0]
    check(parts, dtype, tokens, gates)
    fused = interpret is None
    layout = plgpu.Layout.WG_STRIDED((CHUNK,), 4)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.channels)
    taken = [weight] if bias is None else [weight, bias]
    flat = [array for arrays in constants for array in arrays]
    chunks = channels // CHUNK
    if rows is None:
        # It then reads the weights once for all of them and waits once for all their columns.
        rows = _ROWS if tokens == 1 and batch % _ROWS == 0 and batch >= _MANY_ROWS else 1
    # Every warp has all heads.
    head_layout = tiled_layout(plgpu, ((_HEADS,), (1,)), (plgpu.Replicated(4),), (-2,), -1)

    def body(window: Any, projected: Any, position_in: Any, weight: Any, *rest: Any) -> None:
        ours = len(taken) - 1 + len(flat)
        heads_in, outputs = list(rest[len(taken) - 1 : ours]), rest[ours:]
        first = lax.axis_index("chunk") * CHUNK
        mine = [lax.axis_index("rows") * rows + i for i in range(rows)]

        @pl.when(first < channels)
        def _():
            convolve_chunk(window, projected, position_in, weight, rest, outputs[: len(parts)], mine, first)

        def load_heads(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=head_layout, optimized=False)

        @pl.when(first == channels)
        def _():
            for gate, arrays, output in zip(gates, constants, outputs[len(parts) :], strict=True):
                values = [load_heads(heads_in.pop(0)) for _ in arrays]
                for row in mine:
                    for t in range(tokens):
                        raw = load_heads(projected.at[row, t, pl.ds(gate.first, gate.heads)])
                        output[row, t] = gate_value(gate, raw, values, log1p=series_log1p)

    def convolve_chunk(
        window: Any,
        projected: Any,
        position_in: Any,
        weight: Any,
        rest: Any,
        outputs: Any,
        mine: list,
        first: Any,
    ) -> None:
        here, fresh = pl.ds(first, CHUNK), pl.ds(offset + first, CHUNK)

        def load(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def slot(position: Any, ahead: int) -> jax.Array:
            return lax.rem(position + (columns + ahead), jnp.int32(columns))

        # What does not wait for the positions comes first.
        positions = [position_in[row] for row in mine]
        new = [[load(projected.at[row, t, fresh]) for t in range(tokens)] for row in mine]
        weights = [load(weight.at[tap, here]).astype(jnp.float32) for tap in range(taps)]
        shift = None if bias is None else load(rest[0].at[here]).astype(jnp.float32)
        past = [
            [load(window.at[row, slot(position, i - (taps - 1)), here]) for i in range(taps - 1)]
            for row, position in zip(mine, positions, strict=True)
        ]
        for row, position, fresh_columns in zip(mine, positions, new, strict=True):
            for t in range(tokens):
                window[row, slot(position, t), here] = fresh_columns[t]
        lines = [before + after for before, after in zip(past, new, strict=True)]

        def output_of(line: list, t: int) -> jax.Array:
            total = line[t].astype(jnp.float32) * weights[0]
            for tap in range(1, taps):
                total = total + line[t + tap].astype(jnp.float32) * weights[tap]
            if shift is not None:
                total = total + shift
            return (total / (1.0 + jnp.exp(-total))).astype(dtype)

        for part, output, begin, end in zip(parts, outputs, ends, ends[1:], strict=False):

            @pl.when((first >= begin) & (first < end))
            def _(part=part, output=output, begin=begin):
                for row, line in zip(mine, lines, strict=True):
                    for t in range(tokens):
                        values = output_of(line, t)
                        if part.scale is not None:
                            x = values.astype(jnp.float32)
                            factor = lax.rsqrt(_warp_sums(plgpu, layout, x * x, fused) + 1e-6)
                            values = (x * factor * part.scale).astype(dtype)
                        _store(plgpu, layout, output.at[row], t, values, first - begin, fused)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct((batch, part.groups, tokens, part.width), dtype) for part in parts
        )
        + tuple(jax.ShapeDtypeStruct((batch, tokens, gate.heads), jnp.float32) for gate in gates),
        grid=(batch // rows, chunks + (1 if gates else 0)),
        grid_names=("rows", "chunk"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="convolution",
        **({} if interpret is None else {"interpret": interpret}),
    )
    reference = jax.new_ref(window)
    outputs = kernel(reference, projected, position, *taken, *flat)
    return tuple(outputs[: len(parts)]), tuple(outputs[len(parts) :]), jax.freeze(reference)


def _warp_sums(plgpu: Any, layout: Any, x: jax.Array, fused: bool) -> jax.Array:
    """The sum over the 128 channels of its warp, at every channel."""
    if not fused:
        sums = jnp.sum(x.reshape(-1, _LANES), axis=1, keepdims=True)
        return jnp.broadcast_to(sums, (CHUNK // _LANES, _LANES)).reshape(-1)

    from jax.experimental.mosaic.gpu import FragmentedArray, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)
    )
    def sums(_, x):
        registers = x.registers.copy()
        for index, register in enumerate(registers.flat):
            total = vector.reduction(ir.F32Type.get(), vector.CombiningKind.ADD, register)
            for distance in (16, 8, 4, 2, 1):
                total = arith.addf(total, utils.shfl_bfly(total, distance))
            registers.flat[index] = vector.broadcast(register.type, total)
        return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return sums(x)


def _store(
    plgpu: Any, layout: Any, target: Any, t: int, values: jax.Array, first: jax.Array, fused: bool
) -> None:
    """Channels first .. first + CHUNK of token t into target [G, T, width]."""
    _, tokens, width = target.shape
    if not fused:
        for start in range(0, CHUNK, _TILE):
            channel = first + start
            place = pl.ds(lax.rem(channel, width), _TILE)
            target[lax.div(channel, width), t, place] = values[start : start + _TILE]
        return

    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    channel = first + plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
    group = lax.div(channel, width)
    places = channel + (group * (tokens - 1) + t) * width

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store(_, target, values, places):
        i64, sixteen = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(16)
        for register, place in zip(values.registers.flat, places.registers.flat, strict=True):
            index = vector.extract(place, dynamic_position=[], static_position=[0])
            pointer = utils.getelementptr(utils.memref_ptr(target), [index], sixteen)
            four = utils.bitcast(register, i64)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [pointer, four],
                "st.global.b64 [$0], $1;",
                "l,l",
                has_side_effects=True,
            )

    store(target, values, places)

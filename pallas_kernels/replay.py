"""Array functions of the kernels of one recurrence: window, flush, eager step, and the replay step made of
two of them.

Arrays: checkpoint or state [B, H, V, K]; a ring is (values [B, G, R, (H/G)*V], keys [B, G, R, K], then
float32 scalars [B, R, H]: dt, or log decay and beta); `new` is the same with T slots; reader [B, G, T, K];
constants float32 [n, H] or None (Mamba-2: A and D); start and length int32 [B], the row's folded tokens and
its committed ring entries. Token p lies in slot p mod R. Buffers that the caller donates are written in
place.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch
from pallas_kernels.coded_window import stream_coded_window
from pallas_kernels.eager import eager_tiles
from pallas_kernels.fold import TokenRule, flush_tiles, flush_work
from pallas_kernels.pipeline import TILE, Geometry, Operands, Recurrence
from pallas_kernels.rewrite import FLOAT32, Formats, by_tiles
from pallas_kernels.window import stream_window
from pallas_kernels.window_parts import Work

Ring = tuple[jax.Array, ...]
WORD = 32


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The two rules of a recurrence and the calls made of them."""

    name: str
    window_rule: Recurrence
    token_rule: TokenRule

    def check(self, geometry: Geometry) -> None:
        """Raise `Unsupported`, with the reason, on a JAX or on sizes that the kernels cannot serve."""
        launch.require_jax()
        geometry.check()
        self.window_rule.check(geometry)

    def window(
        self,
        checkpoint: jax.Array,
        ring: Ring,
        new: Ring,
        reader: jax.Array,
        constants: jax.Array | None,
        start: jax.Array,
        length: jax.Array,
        *,
        out_dtype: Any = jnp.float32,
        parameters: launch.LaunchParameters | None = None,
        interpret: Any = None,
    ) -> tuple[jax.Array, Ring]:
        """Outputs [B, T, H, V] of T new tokens from checkpoint and ring, and the ring with the tokens
        appended."""
        call = _Call(checkpoint, ring, new, reader, constants, out_dtype)
        plan = launch.plan(jnp.zeros(start.shape, jnp.bool_), start, length)
        call.window(self.window_rule, plan, call.parameters(parameters, self.name), interpret=interpret)
        return call.outputs(), call.ring()

    def eager(
        self,
        state: jax.Array,
        new: Ring,
        reader: jax.Array,
        constants: jax.Array | None,
        plan: tuple | None = None,
        *,
        out_dtype: Any = jnp.float32,
        ctas: int = launch.EAGER_CTAS,
        interpret: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs [B, 1, H, V] and the new state of one eager step.

        plan: of the rows to serve, all marked as flushing; None means every row.
        """
        call = _Call(state, None, new, reader, constants, out_dtype, writes_state=True)
        call.eager(self.token_rule, plan or (None, None), ctas, interpret=interpret)
        return call.outputs(), call.state()

    def snapshots(
        self,
        states: jax.Array,
        new: Ring,
        reader: jax.Array,
        constants: jax.Array | None,
        position: jax.Array,
        *,
        out_dtype: Any = jnp.float32,
        ctas: int = launch.EAGER_CTAS,
        interpret: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs [B, T, H, V] and states of T eager steps that keep the state after every token.

        states: [S, B, H, V, K], T <= S; the state after position p of a row lies in slot p mod S. position:
        int32 [B], tokens of the row before the call; its state is read from slot position - 1.
        """
        slots, batch = states.shape[:2]
        if new[0].shape[2] > slots:
            raise launch.Unsupported(f"{new[0].shape[2]} tokens need as many states, got {slots}")
        call = _Call(states, None, new, reader, constants, out_dtype, writes_state=True)
        plan = launch.plan(jnp.ones((batch,), jnp.bool_), position, jnp.zeros((batch,), jnp.int32))
        call.eager(self.token_rule, plan, ctas, states=slots, interpret=interpret)
        return call.outputs(), call.state()

    def step(
        self,
        checkpoint: jax.Array,
        ring: Ring,
        new: Ring,
        reader: jax.Array,
        constants: jax.Array | None,
        plan: tuple[jax.Array, jax.Array],
        *,
        forgotten: jax.Array | None = None,
        out_dtype: Any = jnp.float32,
        parameters: launch.LaunchParameters | None = None,
        interpret: Any = None,
    ) -> tuple[jax.Array, jax.Array, Ring]:
        """One replay step by `launch.plan(flush, start, length)`: the rows that flush fold their ring first.

        Returns outputs [B, T, H, V], checkpoint and ring. Outputs of a flushing row come from its checkpoint
        as stored; a flush of length 0 and a row that does not flush keep their checkpoint bit for bit. The
        new tokens lie in the ring at positions start + length .. start + length + T - 1. The cursors are the
        caller's to move. forgotten: bool [B, H], heads whose checkpoint adds so little to the outputs, or to
        the checkpoint of a flushing row, that it may be taken for zero: tiles of such heads are not read, in
        groups of up to 32 tiles.
        """
        call = _Call(checkpoint, ring, new, reader, constants, out_dtype, writes_state=True)
        if forgotten is not None and call.geometry.tiles <= WORD:
            call.operands["forgotten"] = forgotten_tiles(forgotten, call.geometry)
        parameters = call.parameters(parameters, self.name)
        if call.flushes_apart(parameters):
            call.flush(self.token_rule, plan, parameters.flush_workers, interpret=interpret)
        call.window(self.window_rule, plan, parameters, self.token_rule, interpret=interpret)
        return call.outputs(), call.state(), call.ring()

    def stored_step(
        self,
        checkpoint: tuple,
        copy: tuple | None,
        ring: Ring,
        new: Ring,
        reader: jax.Array,
        constants: jax.Array | None,
        plan: tuple[jax.Array, jax.Array],
        formats: Formats,
        words: jax.Array | None = None,
        *,
        out_dtype: Any = jnp.float32,
        parameters: launch.LaunchParameters | None = None,
        interpret: Any = None,
    ) -> tuple[jax.Array, tuple, tuple | None, Ring]:
        """`step` with a checkpoint and a copy for reads in other formats than float32.

        checkpoint, copy: the arrays of a stored state: one [B, H, V, K]; or codes uint8 [B, H, V, bytes of a
        row], nvfp4 in lane order (`numerics.to_lane_order`), scale float32 [B, H, V] and, for nvfp4, block
        scales uint8 [B, H, V, K / 16]. copy: None where formats.read is None. words: uint32 [B, 2] for
        stochastic rounding: the row's hash up to the element, and the place of the first.
        Returns outputs, checkpoint, copy and ring. Rows that do not flush read the copy where there is one.
        """
        formats.check()
        options = {"writes_state": True, "formats": formats, "copy": copy, "words": words}
        call = _Call(checkpoint, ring, new, reader, constants, out_dtype, **options)
        formats.check_sizes(call.geometry)
        parameters = parameters or launch.step_parameters(
            launch.device_kind(), self.name, call.geometry.tokens, formats.read_bits / 8
        )
        if call.flushes_apart(parameters):
            call.flush(self.token_rule, plan, parameters.flush_workers, interpret=interpret)
        call.window(self.window_rule, plan, parameters, self.token_rule, interpret=interpret)
        return call.outputs(), call.checkpoint(), call.copy(), call.ring()


def forgotten_tiles(heads: jax.Array, geometry: Geometry) -> jax.Array:
    """`Operands.forgotten`, int32 [B*G]: bits of the tiles all of whose rows belong to heads that are set.

    heads: bool [B, H].
    """
    geo = geometry
    rows = jnp.repeat(heads.reshape(-1, geo.group_heads), geo.head_dim, axis=1)
    tiles = jnp.all(rows.reshape(-1, geo.tiles, TILE), axis=2)
    bits = jnp.left_shift(jnp.int32(1), jnp.arange(geo.tiles, dtype=jnp.int32))
    return jnp.sum(jnp.where(tiles, bits, 0), axis=1, dtype=jnp.int32)


class _Call:
    """References of one call, shared by its kernels."""

    def __init__(
        self,
        state: jax.Array | tuple,
        ring: Ring | None,
        new: Ring,
        reader: jax.Array,
        constants: jax.Array | None,
        out_dtype: Any,
        *,
        writes_state: bool = False,
        formats: Formats = FLOAT32,
        copy: tuple | None = None,
        words: jax.Array | None = None,
    ) -> None:
        launch.require_jax()
        state, *scale = state if isinstance(state, tuple) else (state,)
        copies, (batch, heads, head_dim, d_state) = math.prod(state.shape[:-4]), state.shape[-4:]
        groups, tokens = new[0].shape[1:3]
        slots = launch.GRANULE if ring is None else ring[0].shape[2]
        self.geometry = geo = Geometry(batch, groups, heads, head_dim, d_state, slots, tokens)
        geo.check()
        self.shapes = state.shape, () if ring is None else tuple(array.shape for array in ring)
        blocks, tiles = batch * groups, geo.tiles
        state_view = state.reshape(copies * blocks * tiles, TILE, d_state)
        values = keys = None
        scalars: tuple = ()
        if ring is not None:
            values = jax.new_ref(ring[0].reshape(blocks, slots, tiles, TILE))
            keys = jax.new_ref(ring[1].reshape(blocks, slots, d_state))
            scalars = tuple(jax.new_ref(array) for array in ring[2:])
        self.operands = {
            "out": jax.new_ref(lax.empty((batch, tokens, groups, tiles, TILE), out_dtype)),
            "state": jax.new_ref(state_view) if writes_state else state_view,
            "values": values,
            "keys": keys,
            "scalars": scalars,
            "new_values": new[0].reshape(blocks, tokens, tiles, TILE),
            "new_keys": new[1].reshape(blocks, tokens, d_state),
            "new_scalars": tuple(new[2:]),
            "reader": reader.reshape(blocks, tokens, d_state),
            "constants": constants,
            "words": words,
        }
        self.formats = formats
        self.stored = (state, *scale), copy
        if scale:
            self.operands["scale"] = jax.new_ref(scale[0].reshape(blocks * tiles, TILE))
        if copy is not None and formats.read is not None:
            views = by_tiles(formats.read, copy, blocks * tiles)
            self.operands["copy"] = tuple(map(jax.new_ref, views))

    def parameters(self, given: launch.LaunchParameters | None, name: str) -> launch.LaunchParameters:
        itemsize = self.operands["state"].dtype.itemsize
        return given or launch.step_parameters(launch.device_kind(), name, self.geometry.tokens, itemsize)

    def alone(self) -> bool:
        """Whether the window's kernel folds all rows beside the others."""
        return self.geometry.batch <= launch.ONE_LAUNCH_ROWS

    def coded(self) -> bool:
        """Whether the window reads codes."""
        return (self.formats.read or self.formats.recurrence) in ("fp8_e4m3", "nvfp4")

    def flushes_apart(self, parameters: launch.LaunchParameters) -> bool:
        """Whether a step needs a flush in a kernel of its own: beside the window it rounds to nearest,
        without codes or copies."""
        plain = self.stored[1] is None and self.operands["words"] is None
        return self.coded() or not plain or not parameters.beside

    def window(
        self,
        rule: Recurrence,
        plan: tuple,
        parameters: launch.LaunchParameters,
        flush: TokenRule | None = None,
        *,
        interpret: Any = None,
    ) -> None:
        cursor, counts = plan
        operands = Operands(**self.operands, cursor=cursor, counts=counts)

        def work(rule: TokenRule, workers: int, **options: Any) -> Work:
            options |= {"formats": self.formats, "interpret": interpret}
            return Work(*flush_work(rule, self.geometry, operands, workers=workers, **options), workers)

        if self.coded():
            read = self.formats.read or self.formats.recurrence
            stream_coded_window(rule, self.geometry, operands, read, parameters, interpret=interpret)
            return
        beside = before = None
        if flush is not None and not self.flushes_apart(parameters):
            beside = work(flush, 1, stages=parameters.beside)
            if not self.alone():
                before = functools.partial(work, flush, stages=1, claims=interpret is None)
        if operands.copy:
            operands = dataclasses.replace(operands, state=operands.copy[0])
        if self.alone() and not rule.apart:
            # A claim takes longer than a CTA's few tiles, unless coefficients hide it.
            parameters = dataclasses.replace(parameters, claims=False)
        options = {"beside": beside, "before": before, "interpret": interpret}
        stream_window(rule, self.geometry, operands, parameters, **options)

    def flush(self, rule: TokenRule, plan: tuple, workers: int, **options: Any) -> None:
        cursor, counts = plan
        operands = Operands(**self.operands, cursor=cursor, counts=counts)
        flush_tiles(rule, self.geometry, operands, workers, formats=self.formats, **options)

    def eager(self, rule: TokenRule, plan: tuple, ctas: int, **options: Any) -> None:
        cursor, counts = plan
        operands = Operands(**self.operands, cursor=cursor, counts=counts)
        eager_tiles(rule, self.geometry, operands, ctas, **options)

    def outputs(self) -> jax.Array:
        geo = self.geometry
        return jax.freeze(self.operands["out"]).reshape(geo.batch, geo.tokens, geo.heads, geo.head_dim)

    def state(self) -> jax.Array:
        return jax.freeze(self.operands["state"]).reshape(self.shapes[0])

    def checkpoint(self) -> tuple:
        """Arrays of the stored checkpoint."""
        if "scale" not in self.operands:
            return (self.state(),)
        return self.state(), jax.freeze(self.operands["scale"]).reshape(self.stored[0][1].shape)

    def copy(self) -> tuple | None:
        """Arrays of the copy for reads."""
        if self.stored[1] is None:
            return None
        pairs = zip(self.operands["copy"], self.stored[1], strict=True)
        return tuple(jax.freeze(ref).reshape(part.shape) for ref, part in pairs)

    def ring(self) -> Ring:
        refs = (self.operands["values"], self.operands["keys"], *self.operands["scalars"])
        return tuple(jax.freeze(ref).reshape(shape) for ref, shape in zip(refs, self.shapes[1], strict=True))

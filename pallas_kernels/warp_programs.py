"""The warps' programs on a state tile as functions of arrays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import BLOCK, Warp, tile_rows
from pallas_kernels.new_tokens import NewTokens, write_single_output


def fold_block(
    rule: Any,
    plgpu: Any,
    layout: Any,
    state: jax.Array,
    ring: tuple,
    cursors: tuple[jax.Array, ...],
    place: tuple[jax.Array, ...],
    constants: tuple,
    head_dim: int,
    call: tuple | None = None,
    part_count: int = 3,
) -> jax.Array:
    """State tile [64, K] after the block of up to 16 tokens that begins with token `first`.

    rule: a `TokenRule`. ring, in shared memory: values [R, 64], keys [R, K] (placed by `key_transforms`) and
    a tuple of scalars [R, heads]. cursors int32: begin, first, length; place: the scalars' column of the
    tile's first row, and that row's place in the group. constants: a scalar or [64] each. call: as in
    `write_outputs`; also writes the outputs of the call's tokens from the tile after the block. part_count:
    bfloat16 numbers that the state's are sums of.
    """
    from jax.experimental.mosaic.gpu import FragmentedArray

    from pallas_kernels.lanes import Lanes, first_element, repack, unpack

    vector = layout.reduce(1)
    target = plgpu.ShapeDtypeStruct(state.shape, jnp.float32, layout=layout)
    calls = () if call is None else (call,)
    types = _token_types(plgpu, ring, key_transforms(plgpu)), tuple(_call_types(plgpu, one) for one in calls)

    @plgpu.inline_mgpu(
        arg_types=(layout, types, (layout,) * 5, (vector,) * len(constants)), return_type=target
    )
    def fold(_, tile, references, numbers, constants):
        ops = Lanes()
        begin, oldest, length, *place = map(first_element, numbers)
        per_head, head = tuple(map(first_element, constants)), _head(ops, place, head_dim)
        (values, keys, scalars), calls = references
        warp = Warp(
            ops,
            tile_rows(unpack(tile.registers.flat)),
            (values, keys, scalars),
            ops.rows(keys),
            (begin, oldest, length),
            head,
            per_head,
            part_count,
        )
        new = [_new_tokens(rule, ops, one, head, per_head, part_count) for one in calls]
        result = rule.block(warp, *new)
        registers = tile.registers.copy()
        registers.flat[:] = repack([four for halves in result for four in halves])
        return FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    return fold(state, (ring, calls), (*cursors, *place), constants)


def write_outputs(
    rule: Any,
    plgpu: Any,
    layout: Any,
    state: jax.Array,
    call: tuple,
    place: tuple[jax.Array, ...],
    constants: tuple,
    head_dim: int,
    part_count: int = 3,
) -> None:
    """Writes the outputs of a call's tokens after a state tile [64, K].

    call, in shared memory: (values [T, 64], probes [2 T, K], a tuple of scalars [8, heads]) and the outputs,
    float32 [T, 64]. Else as in `fold_block`.
    """
    from pallas_kernels.lanes import Lanes, first_element, unpack

    vector = layout.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(layout, _call_types(plgpu, call), (layout,) * 2, (vector,) * len(constants))
    )
    def write(_, tile, call, place, constants):
        ops = Lanes()
        head = _head(ops, list(map(first_element, place)), head_dim)
        per_head, rows = tuple(map(first_element, constants)), tile_rows(unpack(tile.registers.flat))
        if ops.rows(call[1]) == 1 and not rule.reads_key:
            (tokens, outputs), skip = call, None if rule.skip is None else per_head[rule.skip]
            factors = functools.partial(rule.factors, ops, per_head)
            write_single_output(ops, rows, tokens, outputs, head, factors, skip)
            return
        new = _new_tokens(rule, ops, call, head, per_head, part_count)
        for p, halves in enumerate(rows):
            new.project(p, new.left(*halves))
        new.store(new.projections())

    write(state, call, place, constants)


def key_transforms(plgpu: Any) -> tuple:
    """Placement of keys in shared memory: equal columns of eight rows lie in different banks."""
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def _token_types(plgpu: Any, tokens: tuple, transforms: tuple = ()) -> tuple:
    ref = plgpu.RefType()
    return ref, plgpu.RefType(transforms), (ref,) * len(tokens[2])


def _call_types(plgpu: Any, call: tuple) -> tuple:
    return _token_types(plgpu, call[0]), plgpu.RefType()


def _head(ops: Any, place: list, head_dim: int) -> Any:
    """Column of scalars of the warp's rows."""
    column, row = place
    return column + ((row + ops.warp * BLOCK) // head_dim - row // head_dim)


def _new_tokens(rule: Any, ops: Any, call: tuple, head: Any, constants: tuple, part_count: int) -> NewTokens:
    tokens, outputs = call
    skip = None if rule.skip is None else constants[rule.skip]

    def factors(scalars: list) -> tuple:
        return rule.factors(ops, constants, scalars)

    options = {"reads_key": rule.reads_key, "part_count": part_count}
    return NewTokens(ops, tokens, outputs, head, factors, skip, **options)

"""Coefficients of the Mamba-2 window by the lanes of four warps: products of keys and readers on the tensor
cores, sums of later log decays by shuffles, a token a lane.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pipeline import Geometry, Group

BLOCK = 16
LANES = 32


def key_products(ops: Any, geo: Geometry, keys: Any, readers: Any, products: Any) -> None:
    """products[half, t, slot] = key of the slot . reader t over half of the columns; bfloat16 in shared
    memory, float32 out."""
    row, quad = ops.lane // 4, ops.lane & 3
    zero = ops.low(quad & 0)
    blocks = geo.d_state // BLOCK
    halves = 2 if blocks % 2 == 0 else 1
    units = geo.slots // BLOCK * halves
    there = row < geo.tokens
    token = ops.select(there, row, row * 0)
    for first in range(0, units, 4):
        unit = ops.warp + first
        half = unit - unit // halves * halves
        slot = unit // halves * BLOCK + row
        total = [zero] * 4
        for p in range(blocks // halves):
            column = quad * 4 + (half * (blocks // halves) + p) * BLOCK
            top, bottom = (ops.quad(keys, place, column) for place in (slot, slot + 8))
            right = [ops.select(there, word, word * 0) for word in ops.quad(readers, token, column)]
            total = ops.product(total, [top[0], bottom[0], top[1], bottom[1]], right)
        for i, value in enumerate(total):
            column = quad * 2 + i % 2
            ops.store(
                products,
                half * geo.tokens + column,
                slot + 8 * (i // 2),
                [value],
                (column < geo.tokens) & (unit < units),
            )


def decay_weights(ops: Any, geo: Geometry, refs: tuple, begin: Any, length: Any) -> None:
    """Weights dt exp(A sum of later dt) (key . reader), with D for the own token, and scales exp(A sum of
    dt).

    refs: dt [slots, heads], constants A and D [2, heads], products as above, weights [T, heads, slots] and
    scale [T, heads]. begin: slot of the oldest of `length` committed tokens.
    """
    dt_ref, constants, products, weights, scale = refs
    ring, tokens = geo.ring, geo.tokens
    halves = 2 if geo.d_state // BLOCK % 2 == 0 else 1
    # The ring's slots in order of age, then the new tokens; slots beyond hold anything and get weight 0.
    ages = [ops.lane + first for first in range(0, geo.slots, LANES)]
    slots, committed = [], []
    for age in ages:
        place = begin + age
        place = ops.select(place < ring, place, place - ring)
        slots.append(ops.select(age < ring, place, age))
        committed.append(age < length)
    rows = [[_product(ops, products, t, tokens, halves, slot) for slot in slots] for t in range(tokens)]
    for first in range(0, geo.head_slots, 16):
        column = ops.warp * 4 + first
        rates, skips = (ops.reals(constants, ops.lane * 0 + i, column) for i in range(2))
        steps = [ops.reals(dt_ref, slot, column) for slot in slots]
        totals = [[] for _ in range(tokens)]
        for h in range(4):
            logs = [step[h] * rates[h] for step in steps]
            past = [ops.select(there, x, 0.0) for there, x in zip(committed, logs, strict=True)]
            tails, total = _later_sums(ops, past)
            for t in range(tokens):
                own = ring + t
                decay = ops.shuffle(logs[own // LANES], own % LANES)
                total = total + decay
                totals[t].append(total)
                for r, age in enumerate(ages):
                    tails[r] = tails[r] + ops.select(age < own, decay, 0.0)
                    weight = steps[r][h] * ops.exp(tails[r]) * rows[t][r]
                    new = ops.select(age < own + 1, weight, 0.0)
                    new = ops.select(ops.equal(age, own), new + skips[h], new)
                    kept = ops.select(committed[r], weight, 0.0)
                    ops.store(
                        weights,
                        column + h + t * geo.head_slots,
                        slots[r],
                        [ops.select(age < ring, kept, new)],
                        age < geo.slots,
                    )
        # Branches between the heads would keep their sums apart.
        for t in range(tokens):
            values = [ops.exp(total) for total in totals[t]]
            ops.store(scale, ops.lane * 0 + t, column, values, ops.equal(ops.lane, 0))


def _product(ops: Any, products: Any, t: int, tokens: int, halves: int, slot: Any) -> Any:
    """Key of a slot . reader t."""
    product = ops.real(products, ops.lane * 0 + t, slot)
    if halves == 2:
        product = product + ops.real(products, ops.lane * 0 + (tokens + t), slot)
    return product


def _later_sums(ops: Any, x: list) -> tuple[list, Any]:
    """For every lane and round the sum of all later elements, and the sum of all."""

    def ahead(value: Any, distance: int) -> Any:
        return ops.select(ops.lane < LANES - distance, ops.shuffle(value, ops.lane + distance), 0.0)

    sums, total = [], None
    for value in reversed(x):
        later = ahead(value, 1)
        for distance in (1, 2, 4, 8, 16):
            later = later + ahead(later, distance)
        whole = ops.shuffle(later + value, 0)
        sums.append(later if total is None else later + total)
        total = whole if total is None else whole + total
    return sums[::-1], total


def by_lanes(group: Group) -> None:
    """Weights and scales of one (row, group) from bfloat16 keys and readers."""
    from pallas_kernels.lanes import Lanes, first_element

    plgpu, geo = group.plgpu, group.geometry
    ref, scalar = plgpu.RefType(), plgpu.Layout.WGMMA
    products = group.scratch["products"]

    @plgpu.inline_mgpu(arg_types=(ref,) * 3)
    def multiply(_, *refs):
        key_products(Lanes(), geo, *refs)

    @plgpu.inline_mgpu(arg_types=((ref,) * 5, (scalar,) * 2))
    def weigh(_, refs, cursors):
        decay_weights(Lanes(), geo, refs, *map(first_element, cursors))

    multiply(group.keys, group.reader, products)
    plgpu.commit_smem()
    begin: jax.Array = lax.rem(group.start, jnp.int32(geo.ring))
    refs = (group.scalars[0], group.constants, products, group.weights, group.scale)
    weigh(refs, (begin, group.length))

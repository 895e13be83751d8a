"""Coefficients of the Gated DeltaNet window by matrix products of warps: rows of (reader, value head), 16 a
warp, taken back over blocks of 16 tokens, newest first.

Per row, from z = q: each token j, newest first, does c_j = beta_j k_j . z and z = alpha_j (z - c_j k_j).
Inside a block only the projections k_i . z move, by the keys' Gram matrix; z follows once a block. Where
there are eight rows at most, nothing is computed in the registers of rows 8 to 15.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import BLOCK, Products, flat, fours, groups_of, scaled
from pallas_kernels.pipeline import Geometry, Group


def adjoint_block(
    ops: Any, geo: Geometry, refs: tuple, begin: Any, first: Any, length: Any, offset: Any, *, newest: bool
) -> None:
    """The adjoint recurrence over a block of 16 tokens, in a warp for 16 rows of (reader, head).

    refs in shared memory: keys [slots, K], readers of the call [T, K], log decays and betas [slots, heads],
    then the results: weights [T, H', slots] and readers z [T, H', K]. The block begins with token `first`
    of the row's `length` committed and T new ones; the first call is for the newest block.
    """
    keys, queries, log_decays, betas, weights, readers = refs
    heads, tokens = geo.group_heads, geo.tokens

    def slot_of(token: Any) -> Any:
        age = first + token
        place = begin + age
        place = ops.select(place < geo.ring, place, place - geo.ring)
        place = ops.select(age < length, place, age - length + geo.ring)
        # Tokens that are not there read the first new one's entries, with weight 0.
        return ops.select(age < length + tokens, place, place * 0 + geo.ring)

    block = Products(ops, keys, slot_of)
    parts = warp_parts(geo, newest=newest)
    halves = range(1 if tokens * heads <= BLOCK // 2 else 2)
    places = [ops.warp // parts * BLOCK + block.row + 8 * half for half in halves]
    used = [place < tokens * heads for place in places]
    places = [ops.select(there, place, place * 0) for there, place in zip(used, places, strict=True)]
    reader = [place // heads for place in places]
    head = [place - t * heads for place, t in zip(places, reader, strict=True)]

    def rows(p: Any) -> tuple[list, list]:
        """Columns 16 p .. 16 p + 15 of z, four a half, and as left operands."""
        column = block.quad * 4 + p * 16
        if not newest:
            columns = [ops.reals(readers, place, column) for place in places]
            return columns, block.left(*columns)
        words = [ops.quad(queries, t, column) for t in reader]
        columns = [[f(w) for w in pair for f in (ops.low, ops.high)] for pair in words]
        return columns, block.interleaved([words])

    part_count = 1 if newest else 3

    def unflatten(carry: list) -> tuple[list, list]:
        four = fours(carry)
        return [four[:part_count], four[part_count:-2]], four[-2:]

    def project(p: Any, carry: list) -> list:
        sums, gram = block.project(p, rows(p)[1], *unflatten(carry))
        return flat(*sums[0], *sums[1], *gram)

    start = [block.zero] * (4 * (2 * part_count + 2))
    sums, gram = unflatten(ops.loop(geo.d_state // 16, project, start))
    own_rows = 2 * len(halves)
    projections = [four[:own_rows] for four in block.joined(sums)]

    def own(ref: Any, half: int) -> list:
        """Scalars of the own tokens, zero for those that the reader does not see."""
        seen = length + reader[half] + 1
        return [
            ops.select(first + token < seen, ops.real(ref, slot, head[half] + offset), 0.0)
            for token, slot in zip(block.tokens, block.slots, strict=True)
        ]

    logs, rates = ([own(ref, half) for half in halves] for ref in (log_decays, betas))
    decays = [[ops.exp(x) for x in part] for part in logs]

    def step_back(tile: int, count: Any, i: Any, carry: list) -> list:
        columns = groups_of(own_rows, carry)
        projections, found = columns[:2], columns[2:]
        quad = count - 1 - i
        owner = block.row * 4 + quad
        for odd in (1, 0):
            decay, update = [], []
            for half in halves:
                at, token = 2 * half + odd, 2 * tile + odd
                weight = rates[half][token] * projections[tile][at]
                found[tile][at] = ops.select(ops.equal(block.quad, quad), weight, found[tile][at])
                decay.append(ops.shuffle(decays[half][token], owner))
                update.append(ops.shuffle(weight * -1.0, owner) * decay[half])
            for n in range(tile + 1):
                products = block.gram_row(gram, tile, quad, odd, n)
                projections[n] = [
                    ops.fma(update[k // 2], products[k % 2], decay[k // 2] * p)
                    for k, p in enumerate(projections[n])
                ]
        return flat(*projections, *found)

    carry = flat(*projections) + [block.zero] * (2 * own_rows)
    counts = block.quads(length + tokens - first)
    for tile in (1, 0):
        carry = ops.loop(counts[tile], functools.partial(step_back, tile, counts[tile]), carry)
    found = groups_of(own_rows, carry)[2:]

    since, whole = zip(*(_running_sums(block, part) for part in logs), strict=True)
    totals = [ops.exp(x) for x in whole]
    back = block.parts(
        [
            [x * ops.exp(since[i // 2][2 * n + i % 2]) * -1.0 for i, x in enumerate(part)]
            for n, part in enumerate(found)
        ]
    )
    share = geo.d_state // 16 // parts
    part = ops.warp - ops.warp // parts * parts

    def move(i: Any, carry: list) -> list:
        p = part * share + i
        moved = block.add(p, scaled(rows(p)[0], totals), back)
        for half in halves:
            ops.store(readers, places[half], block.quad * 4 + p * 16, moved[half], used[half])
        return carry

    ops.loop(share, move, [])

    writes = [there & ops.equal(part, 0) for there in used]
    if newest:
        for half in halves:
            for column in range(0, geo.slots, BLOCK):
                zeros = [block.zero] * 4
                ops.store(weights, places[half], block.quad * 4 + column, zeros, writes[half])
        ops.sync()
    for half in halves:
        for k, (token, slot) in enumerate(zip(block.tokens, block.slots, strict=True)):
            there = writes[half] & (first + token < length + tokens)
            ops.store(weights, places[half], slot, [found[k // 2][2 * half + k % 2]], there)


def warp_parts(geo: Geometry, *, newest: bool) -> int:
    """Warps that share 16 rows, each moving a part of the columns; every one finds all weights.

    Rows of older blocks are both read and written, so each belongs to one warp.
    """
    return max(4 // -(-geo.group_heads * geo.tokens // BLOCK), 1) if newest else 1


def _running_sums(block: Products, x: list) -> tuple[list, Any]:
    """Sums of the four own tokens' x over all tokens up to each, and over all tokens of the block."""
    ops = block.ops

    def over_quads(own: Any) -> tuple[Any, Any]:
        """Sums over the lanes before in the quad, and over all four."""
        total = own
        for shift in (1, 2):
            total = total + ops.select(block.quad < shift, own * 0.0, ops.shuffle(total, ops.lane - shift))
        before = ops.select(block.quad < 1, own * 0.0, ops.shuffle(total, ops.lane - 1))
        return before, ops.shuffle(total, block.row * 4 + 3)

    sums, whole = [], block.zero
    for n in range(2):
        first, second = x[2 * n : 2 * n + 2]
        before, all_four = over_quads(first + second)
        start = whole + before
        sums += [start + first, start + first + second]
        whole = whole + all_four
    return sums, whole


def by_products(group: Group) -> None:
    """Weights and readers of one (row, key head) from bfloat16 keys and readers."""
    from jax.experimental.mosaic.gpu import utils

    from pallas_kernels.lanes import Lanes, first_element

    plgpu, geo = group.plgpu, group.geometry
    ref, scalar = plgpu.RefType(), plgpu.Layout.WGMMA
    refs = (group.keys, group.reader, *group.scalars, group.weights, group.readers)
    begin = lax.rem(group.start, jnp.int32(geo.ring))
    last = lax.div(group.length + geo.tokens - 1, BLOCK)

    def run(first: jax.Array, newest: bool) -> None:
        @plgpu.inline_mgpu(arg_types=((ref,) * len(refs), (scalar,) * 4))
        def block(_, refs, cursors):
            ops = Lanes()
            rows = ops.warp // warp_parts(geo, newest=newest) * BLOCK
            with utils.when((rows < geo.group_heads * geo.tokens).raw):
                adjoint_block(ops, geo, refs, *map(first_element, cursors), newest=newest)

        block(refs, (begin, first, group.length, group.offset))

    def older(i: jax.Array, carry: None) -> None:
        plgpu.commit_smem()
        run((last - 1 - i) * BLOCK, False)
        return carry

    run(last * BLOCK, True)
    lax.fori_loop(0, last, older, None)

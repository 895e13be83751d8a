"""Folding up to 16 tokens at once: a 64-row state tile against their keys on the tensor cores, at float32
accuracy.

Each warp owns 16 rows. Lane 4 g + q holds, of every 16 columns, the four from 4 q on of rows g and g + 8
(`block_layout`: 16 bytes a lane in memory). These registers serve as accumulators (column 2 q + e of the j-th
product is column 4 q + 2 e + j) and as left operands (inner columns 2 q + e and 2 q + 8 + e are columns
4 q + e and 4 q + 2 + e). Keys are bfloat16 and therefore exact; float32 factors are split into three bfloat16
parts.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from pallas_kernels.pipeline import tiled_layout

BLOCK = 16


def block_layout(plgpu: Any) -> Any:
    """Layout of a state tile whose registers are fragments of matrix products: 16 bytes a lane, four lanes a
    row."""
    return tiled_layout(plgpu, ((64, 16), (16, 16), (8, 16), (4,)), (-7,), (-3, -2), -1)


def flat(*fours: list) -> list:
    """The numbers of lists, one after the other."""
    return [x for four in fours for x in four]


def groups_of(count: int, numbers: list) -> list:
    """Lists of so many numbers each."""
    return [numbers[i : i + count] for i in range(0, len(numbers), count)]


def fours(numbers: list) -> list:
    """Lists of four numbers each."""
    return groups_of(4, numbers)


class Fragments:
    """Left operands of products in float32 precision, by the lanes of a warp: g = row, q = quad.

    part_count: bfloat16 parts that a tile's numbers are sums of.
    """

    def __init__(self, ops: Any, part_count: int = 3) -> None:
        self.ops, self.part_count = ops, part_count
        self.row, self.quad = ops.lane // 4, ops.lane & 3
        self.zero = ops.low(self.quad & 0)

    def split(self, pairs: list, count: int) -> list:
        """Lists of packed bfloat16 that add up to the pairs of float32, largest first."""
        parts: list = []
        while True:
            packed = [self.ops.pack(*pair) for pair in pairs]
            parts.append(packed)
            if len(parts) == count:
                return parts
            pairs = [
                (a - self.ops.low(p), b - self.ops.high(p)) for (a, b), p in zip(pairs, packed, strict=True)
            ]

    def left(self, *halves: list) -> list:
        """Left operands, one a part, of 16 columns of rows g and, where they are given, g + 8."""
        pairs = [pair for half in halves for pair in (tuple(half[:2]), tuple(half[2:]))]
        return self.interleaved([groups_of(2, words) for words in self.split(pairs, self.part_count)])

    def interleaved(self, parts: list) -> list:
        """Left operands of parts, each the two words of rows g and, where they are given, of g + 8."""
        none = (self.quad & 0,) * 2
        return [
            [word for pair in zip(part[0], [*part, none][1], strict=True) for word in pair] for part in parts
        ]

    def product(self, totals: list, left: list, columns: list) -> list:
        """totals [n] + left operand x right operands, one an n."""
        return [self.ops.product(total, left, right) for total, right in zip(totals, columns, strict=True)]

    def products(self, sums: list, left: list, columns: list) -> list:
        """sums [n][part] + left operands, one a part, x right operands, one an n."""
        return [
            [self.ops.product(total, part, right) for total, part in zip(parts, left, strict=True)]
            for parts, right in zip(sums, columns, strict=True)
        ]

    def joined(self, sums: list) -> list:
        """Sums over parts, small ones first."""
        return [[functools.reduce(operator.add, x[::-1]) for x in zip(*parts, strict=True)] for parts in sums]


class Products(Fragments):
    """Products of a warp's 16 rows with the keys of up to 16 tokens, by its lanes.

    rows[p][half]: four columns from 16 p + 4 q on of row g + 8 half. slot(token): row of a token in the
    buffer of keys [slots, K]. A product over tokens is [n][rows g, g, g + 8, g + 8] for tokens 8 n + 2 q and
    8 n + 2 q + 1.
    """

    def __init__(self, ops: Any, keys: Any, slot: Callable[[Any], Any], part_count: int = 3) -> None:
        super().__init__(ops, part_count)
        self.keys, self.token = keys, ops.lane & (BLOCK - 1)
        # The tokens of a product over tokens that this lane holds, for each row.
        self.tokens = [self.quad * 2 + offset for offset in (0, 1, 8, 9)]
        self.slots = [slot(token) for token in self.tokens]
        self._key_slots = [slot(self.row + 8 * tile) for tile in range(2)]

    def project(self, p: Any, left: list, sums: list, gram: list) -> tuple[list, list]:
        """Adds columns 16 p .. 16 p + 15 of rows x keys^T, sums [n][part], and of keys x keys^T, gram [n]."""
        tiles, both = self._columns(p), self.key_rows(p)
        return self.products(sums, left, tiles), self.product(gram, both, tiles)

    def _columns(self, p: Any) -> list:
        """Right operands of columns 16 p .. 16 p + 15 of the keys."""
        return [self.ops.quad(self.keys, slot, self.quad * 4, p * 16) for slot in self._key_slots]

    def key_rows(self, p: Any) -> list:
        """The same columns as a left operand: at row i the key of token i."""
        first, second = self._columns(p)
        return [first[0], second[0], first[1], second[1]]

    def nothing(self, parts: int) -> tuple[list, list]:
        """The sums of `project` before the first columns."""
        four = [self.zero] * 4
        return [[four] * parts] * 2, [four] * 2

    def parts(self, columns: list) -> list:
        """Left operands of columns over tokens; of rows g alone where they hold no others."""
        halves = range(len(columns[0]) // 2)
        pairs = [tuple(columns[n][2 * half : 2 * half + 2]) for half in halves for n in range(2)]
        return self.interleaved([groups_of(2, words) for words in self.split(pairs, 3)])

    def add(self, p: Any, halves: list, parts: list) -> list:
        """Columns 16 p .. 16 p + 15 of rows g and, where they are given, g + 8, plus columns over tokens x
        keys."""
        ops = self.ops
        words = [ops.pair(self.keys, slot, self.row * 2, p * 16) for slot in self.slots]
        new: list = [[None] * 4 for _ in halves]
        for j, choose in enumerate((ops.lows, ops.highs)):
            right = [choose(words[0], words[1]), choose(words[2], words[3])]
            total = [half[i + j] for half in halves for i in (0, 2)]
            total += [self.zero] * (4 - len(total))
            for part in reversed(parts):
                total = ops.product(total, part, right)
            for half, pair in zip(new, groups_of(2, total), strict=False):
                half[j], half[2 + j] = pair
        return new

    def quads(self, tokens: Any) -> list:
        """Quads that hold the first `tokens` of the block: of tokens 0 .. 7, of tokens 8 .. 15."""
        ops = self.ops
        pairs = (tokens + 1) // 2
        low = ops.select(pairs < 4, pairs, pairs * 0 + 4)
        rest = ops.select(pairs < 4, pairs * 0, pairs - 4)
        return [low, ops.select(rest < 4, rest, rest * 0 + 4)]

    def gram_row(self, gram: list, tile: int, quad: Any, odd: int, n: int) -> list:
        """Products of the key of token 8 tile + 2 quad + odd with those of the own tokens of n."""
        lane = (quad * 2 + odd) * 4 + self.quad
        return [self.ops.shuffle(gram[n][2 * tile + e], lane) for e in range(2)]


def scaled(halves: list, factors: list) -> list:
    """Columns of rows g and, where they are given, g + 8 times a factor each."""
    return [[x * f for x in four] for four, f in zip(halves, factors, strict=True)]


class Warp(Products):
    """A warp's 16 rows of a state tile and the block of committed tokens to fold.

    ring: values [R, 64], keys [R, K] and scalars [R, heads], in shared memory. cursor: the slot of the oldest
    committed token, the block's first token and the number of committed ones. head: the rows' column of
    scalars; constants: those of their head.
    """

    def __init__(
        self,
        ops: Any,
        rows: list,
        ring: tuple,
        slots: int,
        cursor: tuple,
        head: Any,
        constants: tuple = (),
        part_count: int = 3,
    ) -> None:
        self.values, keys, self.scalars = ring
        begin, self.first, self.length = cursor
        self.rows, self.head, self.constants = rows, head, constants

        def slot(token: Any) -> Any:
            # Tokens that are not there read the oldest one's entries, with weight 0.
            age = self.first + token
            place = begin + age
            place = ops.select(place < slots, place, place - slots)
            return ops.select(age < self.length, place, begin)

        super().__init__(ops, keys, slot, part_count)
        self._own_slot = slot(self.token)

    def scalar(self, index: int) -> Any:
        """Scalar of token lane mod 16, zero for tokens that are not there."""
        value = self.ops.real(self.scalars[index], self._own_slot, self.head)
        return self.ops.select(self.first + self.token < self.length, value, 0.0)

    def later_sum(self, x: Any) -> Any:
        """Sum of x over the tokens after lane mod 16."""
        ops = self.ops

        def ahead(total: Any, shift: int) -> Any:
            return ops.select(self.token < BLOCK - shift, ops.shuffle(total, ops.lane + shift), 0.0)

        total = ahead(x, 1)
        for shift in (1, 2, 4, 8):
            total = total + ahead(total, shift)
        return total

    def of_tokens(self, x: Any) -> list:
        """Values of x, which lane mod 16 counts by token, at the own tokens: [n-tile][column]."""
        return [[self.ops.shuffle(x, token) for token in self.tokens[2 * n : 2 * n + 2]] for n in range(2)]

    def own_values(self) -> list:
        """Values of the own rows and tokens, float32."""
        rows = [self.ops.warp * BLOCK + self.row + 8 * half for half in range(2)]
        return [
            [self.ops.real(self.values, slot, row) for row in rows for slot in self.slots[2 * n : 2 * n + 2]]
            for n in range(2)
        ]

    def folded(self, log_decay: Any, columns: list) -> list:
        """exp(sum of log_decay) rows + columns exp(later log_decay) x keys."""
        ops = self.ops
        later = self.later_sum(log_decay)
        total = ops.exp(ops.shuffle(later + log_decay, 0))
        tails = self.of_tokens(ops.exp(later))
        columns = [[x * tails[n][i % 2] for i, x in enumerate(part)] for n, part in enumerate(columns)]
        parts = self.parts(columns)
        return [self.add(p, scaled(halves, [total, total]), parts) for p, halves in enumerate(self.rows)]


def tile_rows(flat: list) -> list:
    """A lane's registers of a tile as [p][row g, row g + 8]."""
    return [flat[2 * p : 2 * p + 2] for p in range(len(flat) // 2)]

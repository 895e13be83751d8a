"""Streams of text with tasks of exact answers, for `bench.precision_drift` and its training.

Bytes below 9 and above 127 belong to tasks; the text around them has none. Every task has registers, symbols
of its own. A register is written, then asked for several times, and then written anew; the newest value
counts. Between two mentions lies a distance that the task sets, filled with text and other registers.

- recall: `1 register value`, asked `2 register` -> value, one of 32 symbols.
- copy: `3 register` and four symbols, asked `4 register` -> the four symbols; right when all of them are.
- sum: `5 register digit`, asked `6 register digit` -> the last digit of the sum of both digits.

A cell of the study is a task (a kind and a range of distances) and an interval of positions of the stream.
"""

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np

MARKS = {"recall": 1, "copy": 3, "sum": 5}  # of a write; a question has the next byte
COPIED = 4
ASKED = 4  # times that a value is asked for
FIRST_REGISTER, FIRST_VALUE, VALUES = 128, 224, 32

# What a byte of a stream is: text, a byte of a write or a question, else ANSWER + number of the task.
TEXT, GIVEN, ANSWER = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Task:
    """Registers of a kind, asked for `nearest` to `farthest` bytes after they were last mentioned."""

    kind: str
    registers: int
    nearest: int
    farthest: int

    @property
    def name(self) -> str:
        """Kind and range of distances."""
        return f"{self.kind} {self.nearest}-{self.farthest}"


# As many registers as give every task a similar share of the stream.
TASKS = (
    Task("recall", 3, 64, 256),
    Task("recall", 11, 256, 1024),
    Task("recall", 24, 1024, 4096),
    Task("copy", 2, 64, 256),
    Task("copy", 5, 256, 1024),
    Task("copy", 12, 1024, 4096),
    Task("sum", 3, 64, 512),
    Task("sum", 12, 512, 4096),
)
# Intervals of positions [first, last); with the eight tasks 48 cells.
INTERVALS = (
    (0, 4096),
    (4096, 8192),
    (8192, 16384),
    (16384, 32768),
    (32768, 65536),
    (65536, 131072),
)


class _Register:
    """A register's value, and how often it will still be asked for."""

    def __init__(self, task: int, symbol: int, rng: random.Random):
        self.task, self.kind, self.symbol, self.rng = task, TASKS[task].kind, bytes([symbol]), rng
        self.value, self.left = b"", 0

    def write(self) -> bytes:
        """Bytes that give the register a new value."""
        self.left = ASKED
        if self.kind == "sum":
            self.value = b"%d" % self.rng.randrange(10)
        else:
            count = 1 if self.kind == "recall" else COPIED
            self.value = bytes(FIRST_VALUE + self.rng.randrange(VALUES) for _ in range(count))
        return bytes([MARKS[self.kind]]) + self.symbol + self.value

    def ask(self) -> tuple[bytes, bytes]:
        """Bytes of a question, and the answer."""
        self.left -= 1
        question, answer = bytes([MARKS[self.kind] + 1]) + self.symbol, self.value
        if self.kind == "sum":
            other = self.rng.randrange(10)
            question, answer = question + b"%d" % other, b"%d" % ((int(self.value) + other) % 10)
        return question, answer


def task_stream(
    text: bytes, length: int, seed: int, *, shrink: int = 1, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """A stream of `length` bytes and what each byte is (TEXT, GIVEN, ANSWER + task), uint8 [length].

    text: ASCII without bytes below 9, taken in turn from a random place on. shrink: divides distances and, at
    random, the registers in use; little text is then left. first: is added to the numbers of the tasks.
    """
    rng = random.Random(seed)
    symbols = itertools.count(FIRST_REGISTER)
    registers, spans = [], []
    for number, task in enumerate(TASKS):
        own = [_Register(number, next(symbols), rng) for _ in range(task.registers)]
        registers += rng.sample(own, max(1, task.registers // shrink))
        spans.append((math.log(task.nearest / shrink), math.log(task.farthest / shrink)))

    def distance(register: _Register) -> float:
        return math.exp(rng.uniform(*spans[register.task]))

    body, kinds = bytearray(), bytearray()

    def emit(given: bytes, kind: int) -> None:
        body.extend(given)
        kinds.extend(bytes([kind]) * len(given))

    due = [(rng.random() * distance(register), index) for index, register in enumerate(registers)]
    heapq.heapify(due)
    place = rng.randrange(len(text))
    while len(body) < length:
        when, index = due[0]
        missing = math.ceil(when) - len(body)
        if missing > 0:
            piece = text[place : place + missing]
            place = (place + len(piece)) % len(text)
            emit(piece, TEXT)
            continue
        register = registers[index]
        if register.left:
            question, answer = register.ask()
            emit(question, GIVEN)
            emit(answer, ANSWER + first + register.task)
        else:
            emit(register.write(), GIVEN)
        # A value is given up as soon as it has been asked for often enough.
        pause = distance(register) if register.left else 1.0
        heapq.heapreplace(due, (len(body) + pause, index))
    return np.frombuffer(body[:length], np.uint8), np.frombuffer(kinds[:length], np.uint8)


def answers(kinds: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(task, first byte, byte after the last) of every whole answer of a stream."""
    edges = np.flatnonzero(np.diff(kinds)) + 1
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        if kinds[first] >= ANSWER:
            yield int(kinds[first]) - ANSWER, int(first), int(last)

"""Streams of text with tasks of exact answers, for `bench.precision_drift` and its training.

Bytes below 9 mark a task; the text around them has none. A fact is stated once and asked for later, at a
distance that the task sets; text and the facts of other tasks lie between:

- recall: `1 key key value`, asked `2 key key` -> value; keys and values are letters.
- copy: `3 tag` and five letters, asked `4 tag` -> the five letters; right when all of them are.
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

MARKS = {"recall": 1, "copy": 3, "sum": 5}  # of a fact; the question has the next byte
COPIED = 5
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
TAGS = LETTERS + LETTERS.upper()

# What a byte of a stream is: text, a byte of a fact or a question, else ANSWER + index of the task.
TEXT, GIVEN, ANSWER = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of fact, asked for between `nearest` and `farthest` bytes after it was stated."""

    kind: str
    nearest: int
    farthest: int

    @property
    def name(self) -> str:
        """Kind and range of distances."""
        return f"{self.kind} {self.nearest}-{self.farthest}"


TASKS = (
    Task("recall", 64, 256),
    Task("recall", 256, 1024),
    Task("recall", 1024, 4096),
    Task("copy", 64, 256),
    Task("copy", 256, 1024),
    Task("copy", 1024, 4096),
    Task("sum", 64, 512),
    Task("sum", 512, 4096),
)
# Easier ones, for training alone: what they teach carries over to longer distances.
NEAR_TASKS = (Task("recall", 8, 64), Task("copy", 8, 64), Task("sum", 8, 64))
# Intervals of positions [first, last); with the eight tasks 48 cells.
INTERVALS = (
    (0, 4096),
    (4096, 8192),
    (8192, 16384),
    (16384, 32768),
    (32768, 65536),
    (65536, 131072),
)


class _Facts:
    """Draws facts whose names are not those of facts still to be asked for."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.held: dict[str, set[bytes]] = {"recall": set(), "copy": set(), "sum": set()}

    def _letters(self, count: int) -> bytes:
        return bytes(self.rng.choices(LETTERS, k=count))

    def _name(self, kind: str) -> bytes:
        held = self.held[kind]
        while True:
            name = self._letters(2) if kind == "recall" else bytes(self.rng.choices(TAGS))
            if name not in held:
                held.add(name)
                return name

    def draw(self, kind: str) -> tuple[bytes, bytes, bytes, bytes]:
        """Bytes that state a new fact, bytes that ask for it, its answer, and the name that it holds."""
        name = self._name(kind)
        if kind == "recall":
            stated = answer = self._letters(1)
            question = b""
        elif kind == "copy":
            stated = answer = self._letters(COPIED)
            question = b""
        else:
            first, second = self.rng.randrange(10), self.rng.randrange(10)
            stated, question = b"%d" % first, b"%d" % second
            answer = b"%d" % ((first + second) % 10)
        mark = MARKS[kind]
        return bytes([mark]) + name + stated, bytes([mark + 1]) + name + question, answer, name


def task_stream(
    text: bytes,
    length: int,
    seed: int,
    tasks: tuple[Task, ...] = TASKS,
    *,
    first: int = 0,
    filler: int = 12,
) -> tuple[np.ndarray, np.ndarray]:
    """A stream of `length` bytes and what each byte is (TEXT, GIVEN, ANSWER + task), uint8 [length].

    text: bytes of at least 9, from which pieces of about `filler` bytes between facts are taken in turn, from
    a random place on. first: number of the first of the tasks.
    """
    rng = random.Random(seed)
    facts, place = _Facts(rng), rng.randrange(len(text))
    body, kinds = bytearray(), bytearray()
    due: list[tuple[int, int, tuple]] = []
    ranges = [(math.log(task.nearest), math.log(task.farthest)) for task in tasks]

    def emit(given: bytes, kind: int) -> None:
        body.extend(given)
        kinds.extend(bytes([kind]) * len(given))

    for count in itertools.count():
        if len(body) >= length:
            break
        if due and due[0][0] <= len(body):
            _, _, (task, question, answer, name) = heapq.heappop(due)
            emit(question, GIVEN)
            emit(answer, ANSWER + first + task)
            facts.held[tasks[task].kind].discard(name)
            continue
        piece = rng.randrange(1, 2 * filler + 1)
        if due:
            piece = min(piece, due[0][0] - len(body))
        place = place if place + piece <= len(text) else 0
        emit(text[place : place + piece], TEXT)
        place += piece
        task = rng.randrange(len(tasks))
        if len(facts.held[tasks[task].kind]) < len(TAGS) - 8:
            stated, question, answer, name = facts.draw(tasks[task].kind)
            emit(stated, GIVEN)
            distance = int(math.exp(rng.uniform(*ranges[task])))
            heapq.heappush(due, (len(body) + distance, count, (task, question, answer, name)))
    return np.frombuffer(body[:length], np.uint8), np.frombuffer(kinds[:length], np.uint8)


def answers(kinds: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(task, first byte, byte after the last) of every whole answer of a stream."""
    edges = np.flatnonzero(np.diff(kinds)) + 1
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        if kinds[first] >= ANSWER:
            yield int(kinds[first]) - ANSWER, int(first), int(last)

"""Measurements in processes of their own, which compile side by side and use the device in turns.

python -m bench.processes '{"setting": {"model": "nano-4b", "batch": 256, "method": "replay"}}'
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from bench.decode_loop import Run, Setting, concurrency, line, needed_bytes

# A child takes the memory it needs, not most of the device at its start.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A setting to be measured, or with `memory` (bytes) its largest batch of rows of `max_length`, or with
    `compile_only` the time to compile it."""

    setting: Setting
    memory: int | None = None
    max_length: int = 2048
    compile_only: bool = False

    def describe(self) -> str:
        """The task in a few words."""
        setting = self.setting
        what = f"batch {setting.batch}" if self.memory is None else "rows that fit"
        what += ", compilation" if self.compile_only else ""
        return f"{setting.model} {setting.method} T {setting.window} {what}"


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Holds the lock file, so that processes side by side use the device one after the other."""
    if lock is None:
        yield
        return
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


class Child:
    """A process that compiles a setting, repeats it when told to, and gives its record at the end."""

    def __init__(self, task: Task, log: Path):
        self.task, self._log = task, log
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.processes", json.dumps(dataclasses.asdict(task)), "--obey"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=ENVIRONMENT | os.environ,
            )

    def answer(self, word: str | None = None) -> str:
        """What the process prints next, after a word to it; raises ChildProcessError where it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            if word is not None:
                self._process.stdin.write(word + "\n")
                self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            said = [text for text in self._log.read_text().splitlines() if text.strip()]
            errors = [
                text for text in said if re.match(r"[\w.]*(Error|Exception|ERROR|Unsupported)\b", text)
            ] or said
            raise ChildProcessError(errors[-1][:300] if errors else "ended without a message")
        return answer

    def kill(self) -> None:
        """Ends the process; what waits for its answer learns that there is none."""
        self._process.kill()

    def end(self) -> None:
        """Ends the process, waits for it and closes its pipes; may be called again."""
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        # A word that the process did not live to read is lost.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


def run_group(
    tasks: Sequence[Task], lock: Path, deadline: float, turn_limit: float
) -> list[tuple[dict | None, str]]:
    """Records of tasks whose repeats take turns, or None and the reason where one has none.

    A warm-up repeat of each comes first and is not in its record. deadline: the time.monotonic() at which all
    of them end. turn_limit: seconds on the device after which they do.
    """
    if time.monotonic() >= deadline:
        return [(None, "time limit")] * len(tasks)
    results: list[tuple[dict | None, str]] = [(None, "time limit")] * len(tasks)
    with tempfile.TemporaryDirectory() as folder:
        children = [Child(task, Path(folder) / f"{i}.log") for i, task in enumerate(tasks)]
        alive, expired = dict(enumerate(children)), []

        def expire() -> None:
            expired.append(True)
            for child in children:
                child.kill()

        alarms = [threading.Timer(deadline - time.monotonic(), expire), threading.Timer(turn_limit, expire)]
        alarms[0].start()

        def tell(word: str | None) -> dict[int, str]:
            answers = {}
            for i, child in list(alive.items()):
                try:
                    answers[i] = child.answer(word)
                except ChildProcessError as problem:
                    del alive[i]
                    results[i] = None, "time limit" if expired else str(problem)
            return answers

        try:
            tell(None)
            with turn(lock):
                alarms[1].start()
                for _ in range(max(task.setting.repeats for task in tasks) + 1):
                    tell("repeat")
                for i, answer in tell("record").items():
                    results[i] = json.loads(answer), ""
                for child in children:
                    child.end()
        finally:
            for alarm in alarms:
                alarm.cancel()
            for child in children:
                child.end()
    return results


def in_turns(tasks: Sequence[Task], memory: float) -> list[list[Task]]:
    """Groups for `run_all`: all tasks in one, whose repeats take turns, or each in its own where `memory`
    (bytes) does not hold all at once."""
    together = sum(needed_bytes(task.setting) for task in tasks) < memory
    return [list(tasks)] if together else [[task] for task in tasks]


def run_all(
    groups: Sequence[Sequence[Task]],
    *,
    jobs: int,
    time_limit: float,
    save: Callable[[list[dict], list[dict]], None],
    memory: float = math.inf,
    turn_limit: float = 120.0,
    lock: Path | None = None,
) -> tuple[list[dict], list[dict]]:
    """Runs groups of tasks: (records, tasks left out with the reason). Prints a line as a group ends.

    jobs: groups at once; they compile side by side and use the device one after the other. time_limit:
    seconds after which all ends. save: called with what there is after every group. memory: bytes beyond
    which a setting is left out. turn_limit: seconds that a group may use the device. lock: a file shared with
    other programs that use the device.
    """
    deadline = time.monotonic() + time_limit
    records, left_out = [], []

    def run(group: Sequence[Task]) -> list[tuple[dict | None, str]]:
        for task in group:
            measured = task.memory is None and not task.compile_only
            needed = needed_bytes(task.setting) if measured else 0
            if needed > memory:
                reason = f"needs {needed / 1e9:.1f} GB of {memory / 1e9:.1f} GB"
                return [(None, reason)] * len(group)
        return run_group(group, turns, deadline, turn_limit)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        turns = lock or Path(folder) / "device.lock"
        for group, outcomes in zip(groups, pool.map(run, groups), strict=True):
            for task, (record, reason) in zip(group, outcomes, strict=True):
                if record is None:
                    left_out.append(dataclasses.asdict(task) | {"reason": reason})
                    print(f"left out: {task.describe()}: {reason}", flush=True)
                else:
                    records.append(record | {"interleaved": len(group) > 1})
                    print(line(record), flush=True)
            save(records, left_out)
    return records, left_out


def obey(task: Task) -> None:
    """A child's side: says "ready", then answers the words of its standard input, a line each."""
    run = Run(task.setting) if task.memory is None else None
    seconds = []
    print("ready", flush=True)
    for word in sys.stdin:
        if word.strip() == "repeat":
            if run is not None and not task.compile_only:
                seconds.append(run.repeat())
            print("done", flush=True)
        elif run is not None and task.compile_only:
            print(json.dumps(run.compilation()), flush=True)
        elif run is not None:
            print(json.dumps(run.record(seconds[1:])), flush=True)
        else:
            assert task.memory is not None
            print(json.dumps(concurrency(task.setting, task.max_length, task.memory)), flush=True)


def main() -> None:
    """Command line; measures one task and prints its record as JSON in the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", type=json.loads, help="JSON object of the fields of Task")
    parser.add_argument("--obey", action="store_true", help="work for a parent process, by lines")
    parser.add_argument("--lock", type=Path, help="file to hold while the device is in use")
    parser.add_argument("--trace", type=Path, help="folder for a profile of one more repeat")
    options = parser.parse_args()
    task = Task(**options.task | {"setting": Setting(**options.task["setting"])})
    if options.obey:
        obey(task)
        return
    run = Run(task.setting)
    print(f"lowered in {run.lowering:.1f} s, compiled in {run.compiling:.1f} s", file=sys.stderr)
    with turn(options.lock):
        record = run.record([run.repeat() for _ in range(task.setting.repeats + 1)][1:])
        if options.trace:
            with jax.profiler.trace(str(options.trace)):
                run.repeat()
    print(line(record))
    print(json.dumps(record))


if __name__ == "__main__":
    main()

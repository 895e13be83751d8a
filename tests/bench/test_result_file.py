"""What a result file tells of its run."""

import argparse
import importlib
import subprocess
import sys

import pytest

from bench import result_file
from bench.result_file import commit, measured


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_checkout(tmp_path):
    (tmp_path / "bench" / "results").mkdir(parents=True)
    code, result = tmp_path / "code.py", tmp_path / "bench" / "results" / "a.json"
    for path in (code, result):
        path.write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit(tmp_path) == clean
    # What a run writes is not what it ran.
    result.write_text("2")
    (tmp_path / "note").write_text("new")
    assert commit(tmp_path) == clean
    code.write_text("2")
    assert commit(tmp_path) == clean + "+"


def test_the_commit_is_unknown_without_a_checkout_or_git(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) == "unknown"
    inner = tmp_path / "site-packages"
    inner.mkdir()
    assert commit(inner) == "unknown"
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) == "unknown"


@pytest.mark.parametrize(("given", "recorded"), [([], "abc+"), (["--commit", "def"], "def")])
def test_a_commit_that_is_given_goes_before_the_checkout(given, recorded, monkeypatch):
    monkeypatch.setattr(result_file, "commit", lambda: "abc+")
    parser = argparse.ArgumentParser()
    result_file.add_commit(parser)
    assert parser.parse_args(given).commit == recorded


class Parsed(Exception):
    """Ends a command line after its options."""


@pytest.mark.parametrize(
    "command",
    [
        "e2e_decode_speedup --model nano-4b --batch-size 256",
        "e2e_spec_decode_throughput --model qwen3.5-4b",
        "e2e_transformers --model nano-4b",
        "step_times --model qwen3.5-4b",
        "prefill_calls --model nano-4b",
        "kernel_decode",
        "kernel_sweep",
        "real_drafts",
        "forgotten_reads",
        "forgotten_heads --data d",
        "cpu_decode",
        "cpu_spec_decode --data d",
        "evaluate_embedded --data d",
        "precision_drift --data d",
        "train_drift drift-qwen3.5 --data d --out o",
        "train_embedded tiny-qwen3.5 --data d --out o",
    ],
)
def test_no_benchmark_asks_for_the_commit(command, monkeypatch):
    name, *arguments = command.split()
    module = importlib.import_module(f"bench.{name}")
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser):
        raise Parsed(parse(parser).commit)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(result_file, "commit", lambda: "abc")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed, match="abc"):
        module.main()


def test_the_command_leaves_out_files_of_the_machine():
    given = "--lock /a/b --batches 1,2 --out=/c --outer 3 --commit x --out /d".split()
    assert measured(given) == "--batches 1,2 --outer 3 --commit x".split()

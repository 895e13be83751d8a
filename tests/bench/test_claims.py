"""The claims ledger: it is what the result files give, and its figures are ratios of the right records."""

import pytest

from bench import claims, drift_report, result_file

HEAD = {"commit": "abc", "command": "python -m bench.x", "device": "gpu NVIDIA H200, 1 device(s)"}


def kernel(method, time, **fields):
    return {
        "shape": "super", "batch": 256, "method": method, "op": "decode", "state": "fp32", "window": 1,
        "recurrence": "fp32",
        "phases": "random" if "replay" in method else "synchronised", "buffer_length": 16, "time_us": time,
        "floor_us": 200.0, "bytes": 1_000_000_000,
    } | fields  # fmt: skip


def decode(method, time, **fields):
    return {
        "shape": "nano-4b", "layers": 42, "depth_cut": False, "batch": 256, "method": method, "op": "decode",
        "context": 288, "phases": "random", "state": "fp32", "recurrence": "fp32", "buffer_length": 16,
        "time_us": time, "cache_bytes": 1000, "window": 1, "accepted": 1.0,
    } | fields  # fmt: skip


def speculative(method, rate, window=4):
    return {
        "shape": "nano-4b", "layers": 42, "depth_cut": False, "batch": 256, "method": method, "op": "verify",
        "window": window, "buffer_length": 16, "tokens_per_second": rate, "cache_bytes": 5_000_000_000,
        "aliased_bytes": 5_000_001_024,
    }  # fmt: skip


def rows(method, count):
    memory = {"max_length": 512, "memory_bytes": 10**11}
    return {"shape": "nano-4b", "method": method, "op": "concurrency", "window": 4, "rows": count} | memory


def studied(configuration, divergence, right):
    return {
        "model": "m", "buffer_length": 16, "configuration": configuration, "tokens": 4096,
        "texts": ["a", "tasks"], "kl": [[0.0, divergence], [9.0, 9.0]], "cells": [[[right, 100], [0, 0]]],
    }  # fmt: skip


def forgotten(source, bfloat16, exact):
    record = {"source": source, "buffer_length": 16, "bfloat16": bfloat16, "exact": exact}
    return record | {
        "write_exact": exact, "write_bounded": 2 * bfloat16, "error_bfloat16": 1e-6, "worst_bfloat16": exact,
    }  # fmt: skip


RESULTS = {
    "kernel_decode": HEAD
    | {
        "bench": "bench.kernel_decode",
        "records": [
            kernel("replay", 250.0, error=0.002, state_error=1e-7),
            kernel("replay", 900.0, batch=1, error=0.003, state_error=2e-7),
            kernel("replay", 240.0, op="nonflush"),
            kernel("replay", 60.0, op="nonflush", state="nvfp4", error=0.1, state_error=0.1),
            kernel("replay", 600.0, op="flush"),
            kernel("replay", 700.0, op="flush", state="nvfp4"),
            kernel("replay", 550.0, op="flush", state="nvfp4", recurrence="fp16"),
            kernel("eager", 500.0, bytes=2_000_000_000),
            kernel("peer:vllm", 505.0, bytes=2_000_000_000),
            kernel("peer:mamba-ssm", 510.0, bytes=2_000_000_000),
            # 12 million bytes in 10 us are 1.2 TB/s.
            kernel("eager", 10.0, shape="nano-4b", batch=1, bytes=12_000_000),
        ],
    },
    "whole": HEAD
    | {
        "bench": "bench.e2e_decode_speedup",
        "records": [
            decode("eager", 15.0),
            decode("replay", 10.0, cache_bytes=1100),
            decode("eager", 5.0, batch=1),
            decode("replay", 4.0, batch=1),
            *(decode("eager", 9.0, batch=64, depth_cut=True, context=c) for c in (100, 1000, 20_000)),
            *(decode("replay", 6.0, batch=64, depth_cut=True, context=c) for c in (100, 1000, 20_000)),
        ],
    },
    "study": HEAD
    | {
        "bench": "bench.precision_drift",
        "records": [
            studied(drift_report.FP32, 0.0, 50),
            studied(drift_report.SHARED, 0.3, 20),
            studied(drift_report.SEPARATE, 0.01, 50),
            studied(drift_report.STOCHASTIC, 0.02, 49),
            studied(drift_report.STOCHASTIC, 0.5, 1) | {"buffer_length": 32},
            {"model": "m", "buffer_length": 16, "heads": True},
        ],
    },
    "forgotten": HEAD
    | {
        "bench": "bench.forgotten_heads",
        "records": [
            forgotten("trained", 0.01, 0.0),
            forgotten("trained", 0.1, 0.002),
            forgotten("x", 1.0, 1.0),
        ],
    },
    "skipped": HEAD
    | {
        "bench": "bench.forgotten_reads",
        "records": [
            {"shape": "super", "layers": 11, "batch": 256, "skip": skip, "time_us": time}
            for skip, time in (("off", 900.0), ("exact", 800.0), ("bounded", 850.0))
        ]
        + [
            {"shape": "super", "batch": 256, "skip": skip, "forgotten": share, "time_us": time}
            for skip, share, time in (("off", 0.0, 300.0), ("exact", 0.0, 306.0), ("exact", 0.5, 250.0))
        ],
    },
    "speculative": HEAD
    | {
        "bench": "bench.e2e_spec_decode_throughput",
        "records": [
            speculative("replay", 300.0) | {"bounds": {"conventional": 2.25, "eager": 2.0}},
            speculative("replay", 1.0) | {"drafter": "mtp"},
            speculative("conventional", 150.0),
            speculative("eager", 200.0, window=1),
            rows("replay", 30),
            rows("conventional", 10),
        ],
    },
}
FIGURES = {
    "C1": "super: 0.50 of eager's bytes, in 1.25 times their least time",
    "C2": "RMS ratio to a float64 loop: states at most 2.0e-07, bfloat16 outputs at most 3.0e-03 "
    "(their rounding)",
    "C3": "super 2.02x (vllm)",
    "C4": "nano-4b batch 256: 1.50x",
    "C5": "nano-4b batch 1: 1.25x; our eager kernel's share of 4.8 TB/s: nano-4b 25 %",
    "C7": "nano-4b, 42 layers, batch 64: 1.50x at 100, 1.50x at 1,000, 1.50x at 20,000 (the eager state "
    "is the larger traffic below 20,000)",
    "C8": "nano-4b batch 256: 2.00x, 2.25x at the floors (1.50x over plain eager)",
    "C9": "at most 0 bytes copied of a cache of 5.0 GB; nano-4b: 3.00 times the rows of 512 positions fit",
    "C10": "super nvfp4 4.00x",
    "C11": "KL of m at 4,096 tokens 0.3 falls to 0.01 (30x)",
    "C12": "KL of m at 4,096 tokens 0.3 falls to 0.01 (30x)",
    "C13": "right answers of m: FP32 50.0 %, shared NVFP4, nearest 20.0 %, NVFP4 read, FP8 stochastic 49.0 %",
    "C14": "NVFP4 read + FP8 stochastic inside in m: 1 of 1, 1 by intervals of 198 answers (shared NVFP4: 0)",
    "C15": "trained: 0.0 to 0.2 % of reads left out exactly, 1.0 to 10.0 % by the bound for bfloat16 "
    "(outputs lose 1.0e-06 at most, one head's output at one step 0.002); writes 0.0 to 0.2 % and 2.0 to "
    "20.0 %; "
    "a layer's step (super, batch 256) takes 300 us, with exact skips 306 us where no head forgets and "
    "250 us where half do; super cut to 11 layers, decays as initialised, batch 256: 900 us a step, exact "
    "800 us, bounded 850 us",
    "C16": "nano-4b: cache 10.0 % larger (context 288), super: a flush of all rows 600 us, with an "
    "NVFP4 copy 700 us",
}


def test_the_committed_ledger_is_what_the_result_files_give():
    committed = (result_file.RESULTS.parent / "CLAIMS.md").read_text()
    assert committed == claims.document(claims.load()), "run python -m bench.claims"


def test_every_claim_has_a_row_and_without_results_it_is_open():
    table = [line for line in claims.document({}).splitlines() if line.startswith("| C")]
    assert [line.split(" | ")[0] for line in table] == [f"| C{n}" for n in range(1, 17)]
    assert all(line.endswith("| open |  |  |") for line in table)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_follow_from_records(name):
    (claim,) = (claim for claim in claims.CLAIMS if claim.name == name)
    answer = claim.answer(RESULTS)
    assert answer is not None
    assert answer.figure == FIGURES[name]


def test_the_document_names_the_command_of_every_file_it_uses():
    text = claims.document(RESULTS)
    for name in RESULTS:
        assert f"- `{name}` (commit abc): `python -m bench.x`" in text


def test_a_peer_with_a_faster_eager_kernel_qualifies_the_speedup():
    whole = {"shape": "qwen3.5-4b", "layers": 32, "context": 288}
    slow = {"shape": "nano-4b", "bytes": 1}
    results = {
        "kernel_decode": HEAD
        | {
            "bench": "bench.kernel_decode",
            "records": [
                kernel("eager", 250.0, shape="qwen3.5-4b"),
                kernel("eager", 510.0, shape="qwen3.5-4b", batch=512),
                kernel("peer:fla", 225.0, shape="qwen3.5-4b"),
                kernel("peer:vllm", 240.0, shape="qwen3.5-4b"),
                kernel("eager", 500.0, **slow),
                kernel("peer:vllm", 501.0, **slow),
            ],
        },
        "whole": HEAD
        | {
            "bench": "bench.e2e_decode_speedup",
            "records": [
                *(decode("eager", 12_000.0, batch=batch, **whole) for batch in (64, 256, 512)),
                *(decode("replay", 10_000.0, batch=batch, **whole) for batch in (64, 256, 512)),
                decode("eager", 15.0),
                decode("replay", 10.0),
            ],
        },
    }
    answer = claims.whole_steps(results, (64, 256, 512))
    assert answer is not None
    # 24 layers of 25 us, and of a tenth of 510, less.
    had = "x if the eager step had the kernel of fla, 225 us for 250 at batch 256)"
    assert answer.figure == (
        "nano-4b batch 256: 1.50x, qwen3.5-4b batch 64: 1.20x, "
        f"qwen3.5-4b batch 256: 1.20x (1.14{had}, qwen3.5-4b batch 512: 1.20x (1.08{had}"
    )
    assert answer.files == ["whole", "kernel_decode"]

"""The claims ledger: what the authors of ReplaySSM report, and what this project's result files answer.

Writes bench/CLAIMS.md from bench/results/*.json alone; a claim without a result is marked open.

    python -m bench.claims
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import drift_report, e2e_report, result_file
from bench.e2e_models import STAND_INS, layer_kinds, published
from bench.kernel_cases import MAIN
from bench.kernel_report import EAGER_PEERS, pick, rows_of_table, step
from bench.roofline import bounds_of, floor_parts_of

# The data sheet's bandwidth of an H200, of which the authors' shares of peak are the counterpart.
PEAK_BYTES_A_US = 4.8e6
# Kinds of layers with a state.
RECURRENT = ("M", "linear_attention")
Results = dict[str, dict]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Our figure, its conditions, and the names of the result files that hold it."""

    figure: str
    conditions: str
    files: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the authors with their figure and conditions, and how result files "
    "answer it; None: open."""

    name: str
    claim: str
    figure: str
    conditions: str
    answer: Callable[[Results], Answer | None] = lambda results: None


def load(folder: Path = result_file.RESULTS) -> Results:
    """Result files by name without suffix."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def of_bench(results: Results, bench: str) -> dict[str, list[dict]]:
    """Records of the files that a benchmark wrote, by file."""
    return {name: result["records"] for name, result in results.items() if result["bench"] == bench}


def device(results: Results, files: Sequence[str]) -> str:
    """The devices of some result files, in words."""
    return ", ".join(dict.fromkeys(results[name]["device"].split(",")[0] for name in files))


def kernels(results: Results) -> list[dict]:
    """Records of the kernel benchmark."""
    return [record for records in of_bench(results, "bench.kernel_decode").values() for record in records]


def traffic(results: Results) -> Answer | None:
    """C1: bytes and times of replay's and of eager's steps."""
    parts = []
    for shape in MAIN:
        replay, eager = (step(kernels(results), shape, 256, (method,)) for method in ("replay", "eager"))
        if replay and eager:
            share = replay["bytes"] / eager["bytes"]
            bound = replay["time_us"] / replay["floor_us"]
            parts.append(f"{shape}: {share:.2f} of eager's bytes, in {bound:.2f} times their least time")
    if not parts:
        return None
    return Answer(
        figure="; ".join(parts),
        conditions="batch 256, flushes included at their true rate; bytes follow from the sizes, the "
        "least time "
        "from measured bandwidths",
        files=list(of_bench(results, "bench.kernel_decode")),
    )


def exactness(results: Results) -> Answer | None:
    """C2: errors of the timed launches against a float64 loop."""
    ours = [r for r in kernels(results) if r["state"] == "fp32" and r["method"] in ("replay", "eager")]
    outputs = [r["error"] for r in ours if "error" in r]
    states = [r["state_error"] for r in ours if "state_error" in r]
    if not states:
        return None
    return Answer(
        figure=f"RMS ratio to a float64 loop: states at most {max(states):.1e}, bfloat16 outputs at most "
        f"{max(outputs):.1e} (their rounding)",
        conditions=f"{len(outputs)} records of the timed launches, float32 states, T = 1 to 8",
        files=list(of_bench(results, "bench.kernel_decode")),
    )


def kernel_speedup(results: Results) -> Answer | None:
    """C3: our replay over the fastest eager kernel of any peer."""
    parts = []
    for shape in MAIN:
        replay = step(kernels(results), shape, 256, ("replay",))
        peer = step(kernels(results), shape, 256, EAGER_PEERS)
        if replay and peer:
            name = peer["method"].removeprefix("peer:")
            parts.append(f"{shape} {peer['time_us'] / replay['time_us']:.2f}x ({name})")
    if not parts:
        return None
    return Answer(
        figure=", ".join(parts),
        conditions="batch 256, flush included, against the fastest eager kernel of any peer, each "
        "with its best "
        "launch of a sweep",
        files=list(of_bench(results, "bench.kernel_decode")),
    )


def with_best_peer(records: list[dict], place: e2e_report.Place, pair: dict[str, dict]) -> str:
    """In brackets, the speed-up if the eager step had a peer's kernel that is faster than ours; "" where none
    is. Peers that were not timed at a larger batch are taken from batch 256, as a share of our time."""
    for batch in (place.batch, 256) if place.batch > 256 else (place.batch,):
        ours, peer = (step(records, place.shape, batch, by) for by in (("eager",), EAGER_PEERS))
        here = step(records, place.shape, place.batch, ("eager",))
        if ours and peer and here:
            break
    else:
        return ""
    share = peer["time_us"] / ours["time_us"]
    if share >= 1:
        return ""
    layers = sum(kind in RECURRENT for kind in layer_kinds(published(place.shape)))
    eager = pair["eager"]["time_us"] - layers * here["time_us"] * (1 - share)
    times = f"{peer['time_us']:.3g} us for {ours['time_us']:.3g} at batch {batch}"
    name = peer["method"].removeprefix("peer:")
    return f" ({eager / pair['replay']['time_us']:.2f}x if the eager step had the kernel of {name}, {times})"


def whole_steps(results: Results, batches: Sequence[int]) -> Answer | None:
    """C4, C5: whole decode steps at some batches, whole models."""
    files, parts = [], []
    compared = list(of_bench(results, "bench.kernel_decode"))
    for name, records in of_bench(results, "bench.e2e_decode_speedup").items():
        for place, pair in e2e_report.pairs(records).items():
            if place.batch in batches and place.plain and not place.depth_cut:
                peer = with_best_peer(kernels(results), place, pair)
                parts.append(f"{place.shape} batch {place.batch}: {e2e_report.speedup(pair):.2f}x{peer}")
                files += [name, *(compared if peer else ())]
    if not parts:
        return None
    return Answer(
        figure=", ".join(parts),
        conditions="whole models, random bfloat16 weights, a few hundred tokens of context, against "
        "our eager step; ratios with a peer's kernel are computed from the kernels' own times",
        files=list(dict.fromkeys(files)),
    )


def one_row(results: Results) -> Answer | None:
    """C5: whole steps at batch 1, and how far our eager kernel is from the DRAM's peak there."""
    whole = whole_steps(results, (1,))
    if whole is None:
        return None
    shares = []
    for shape in ("nano-4b", "qwen3.5-4b"):
        if eager := step(kernels(results), shape, 1, ("eager",)):
            shares.append(f"{shape} {100 * eager['bytes'] / eager['time_us'] / PEAK_BYTES_A_US:.0f} %")
    if not shares:
        return whole
    return Answer(
        figure=f"{whole.figure}; our eager kernel's share of 4.8 TB/s: {', '.join(shares)}",
        conditions=f"{whole.conditions}; the kernel of one layer, nothing of it in the L2",
        files=list(dict.fromkeys([*whole.files, *of_bench(results, "bench.kernel_decode")])),
    )


def saturation(results: Results) -> Answer | None:
    """C6: bandwidth of the eager peers, and how the two gains grow with the batch."""
    records = kernels(results)
    shares = [
        peer["bytes"] / peer["time_us"] / PEAK_BYTES_A_US
        for shape in MAIN
        for batch in (128, 256, 512, 1024)
        if (peer := step(records, shape, batch, EAGER_PEERS))
    ]
    gains = {}
    for shape in ("nano-4b", "qwen3.5-4b"):
        for batch in (64, 256, 512):
            eager, replay = (step(records, shape, batch, (method,)) for method in ("eager", "replay"))
            if eager and replay:
                gains.setdefault(shape, []).append(f"{eager['time_us'] / replay['time_us']:.2f}")
    whole = whole_steps(results, (64, 256, 512))
    if not shares or not gains:
        return None
    kernel_gains = "; ".join(f"{shape} {', '.join(values)}" for shape, values in gains.items())
    figure = f"fastest eager peers at {100 * min(shares):.0f} to {100 * max(shares):.0f} % of 4.8 TB/s; "
    figure += f"kernel gain at batch 64, 256, 512: {kernel_gains}"
    return Answer(
        figure=figure + (f"; whole steps: {whole.figure}" if whole else ""),
        conditions="peers from batch 128 on; gains of our kernels over our eager kernel",
        files=list(
            dict.fromkeys([*of_bench(results, "bench.kernel_decode"), *(whole.files if whole else ())])
        ),
    )


def contexts(results: Results) -> Answer | None:
    """C7: speed-ups by context, and the context from which keys and values take more of the least time than
    the states."""
    parts, files = [], []
    for name, records in of_bench(results, "bench.e2e_decode_speedup").items():
        found = e2e_report.pairs(records)
        for places in e2e_report.series(found):
            shape, layers, batch = places[0].size
            gains = [f"{e2e_report.speedup(found[place]):.2f}x at {place.context:,}" for place in places]
            floors = {place: floor_parts_of(found[place]["eager"]) for place in places}
            beyond = [place.context for place in places if floors[place]["kv"] > floors[place]["state"]]
            least = f"below {beyond[0]:,}" if beyond else "everywhere"
            text = f"{shape}, {layers} layers, batch {batch}: {', '.join(gains)}"
            parts.append(f"{text} (the eager state is the larger traffic {least})")
            files.append(name)
    if not parts:
        return None
    return Answer(
        figure="; ".join(parts),
        conditions="depth cuts with the models' mix of layers, float32 states, bfloat16 keys and values",
        files=list(dict.fromkeys(files)),
    )


def speculation(results: Results) -> Answer | None:
    """C8: verification of T = 4 tokens against the conventional method and against plain eager decoding."""
    files, parts = [], []
    for name, records in of_bench(results, "bench.e2e_spec_decode_throughput").items():
        rates: dict[tuple, dict[tuple, float]] = {}
        bounds: dict[tuple, dict[str, float]] = {}
        for r in records:
            if r["op"] == "concurrency" or r["buffer_length"] != 16 or "drafter" in r:
                continue
            if not r["depth_cut"] or r["shape"] in STAND_INS:
                place = r["shape"], f", {r['layers']} layers," * r["depth_cut"], r["batch"]
                rates.setdefault(place, {})[r["method"], r["window"]] = r["tokens_per_second"]
                if (r["method"], r["window"]) == ("replay", 4):
                    bounds[place] = bounds_of(r)
        for (shape, depth, batch), found in rates.items():
            replay, conventional = found.get(("replay", 4)), found.get(("conventional", 4))
            if replay and conventional:
                over = f"{shape}{depth} batch {batch}: {replay / conventional:.2f}x"
                least = bounds.get((shape, depth, batch), {}).get("conventional")
                over += f", {least:.2f}x at the floors" if least else ""
                eager = found.get(("eager", 1))
                parts.append(over + (f" ({replay / eager:.2f}x over plain eager)" if eager else ""))
                files.append(name)
    if not parts:
        return None
    return Answer(
        figure=", ".join(parts),
        conditions="whole models but for cuts of the 120B ones, T = 4, 3 tokens committed a step by draw in "
        "both; no drafter runs; "
        "against our own "
        "conventional step (one state a token), not vLLM's",
        files=list(dict.fromkeys(files)),
    )


def rollback(results: Results) -> Answer | None:
    """C9: what a speculative step copies, and how many rows fit."""
    copies, parts, files = [], [], []
    for name, records in of_bench(results, "bench.e2e_spec_decode_throughput").items():
        for r in records:
            whole = r["op"] != "concurrency" and not r["depth_cut"]
            if whole and r["method"] == "replay" and r["window"] == 4:
                copies.append((max(r["cache_bytes"] - r["aliased_bytes"], 0), r["cache_bytes"] / 1e9))
                files.append(name)
        for ours, theirs in e2e_report.rows_that_fit(records):
            gain = f"{ours['rows'] / theirs['rows']:.2f} times the rows"
            parts.append(f"{ours['shape']}: {gain} of {ours['max_length']:,} positions fit")
            files.append(name)
    if copies:
        copied, size = max(copies)
        parts = [f"at most {copied} bytes copied of a cache of {size:.1f} GB", *parts]
    if not parts:
        return None
    return Answer(
        figure="; ".join(dict.fromkeys(parts)),
        conditions="compiled steps of T = 4 (bytes that do not alias); rows beside the weights",
        files=list(dict.fromkeys(files)),
    )


def low_precision_reads(results: Results) -> Answer | None:
    """C10: the non-flush kernel on copies of the state in smaller formats."""
    parts = []
    for shape in ("super", "q122"):
        fields = {"shape": shape, "batch": 256, "method": "replay", "op": "nonflush"}
        full = pick(kernels(results), **fields)
        for state in ("bf16", "fp16", "fp8_e4m3", "nvfp4"):
            record = pick(kernels(results), state=state, **fields)
            if full and record:
                parts.append(f"{shape} {state} {full['time_us'] / record['time_us']:.2f}x")
    if not any("nvfp4" in part for part in parts):
        return None
    return Answer(
        figure=", ".join(parts),
        conditions="batch 256, T = 1, rings at mean fill, against our kernel reading float32",
        files=list(of_bench(results, "bench.kernel_decode")),
    )


def drift(results: Results) -> Iterator[tuple[str, str, dict[str, dict], list[dict]]]:
    """Models of the precision study at L = 16: file, model, records by configuration, all records."""
    wanted = {drift_report.FP32, drift_report.SHARED, drift_report.SEPARATE, drift_report.STOCHASTIC}
    for name, records in of_bench(results, "bench.precision_drift").items():
        for model in dict.fromkeys(record["model"] for record in records):
            runs = {
                record["configuration"]: record
                for record in records
                if record["model"] == model and record["buffer_length"] == 16 and "configuration" in record
            }
            if wanted <= set(runs):
                yield name, model, runs, records


def divergence(results: Results) -> Answer | None:
    """C11, C12: divergence at the end of the longest texts, shared copy against separate one."""
    parts, files = [], []
    for name, model, runs, _ in drift(results):
        both = runs[drift_report.SHARED], runs[drift_report.SEPARATE]
        shared, separate = (drift_report.plain(record, "kl").mean(axis=0)[-1] for record in both)
        change = f"{shared:.2g} falls to {separate:.2g} ({shared / separate:.0f}x)"
        parts.append(f"{model} at {both[0]['tokens']:,} tokens {change}")
        files.append(name)
    if not parts:
        return None
    return Answer(
        figure="KL of " + "; ".join(parts),
        conditions="models trained here, held-out text, simulated formats, nearest rounding",
        files=list(dict.fromkeys(files)),
    )


def right_answers(results: Results) -> Answer | None:
    """C13: shares of right answers over all tasks and lengths."""
    parts, files = [], []
    for name, model, runs, _ in drift(results):
        shares = []
        for label in (drift_report.FP32, drift_report.SHARED, drift_report.STOCHASTIC):
            cells = [cell for task in runs[label]["cells"] for cell in task]
            right, asked = (sum(cell[i] for cell in cells) for i in range(2))
            if asked:
                shares.append(f"{label} {100 * right / asked:.1f} %")
        if shares:
            parts.append(f"{model}: {', '.join(shares)}")
            files.append(name)
    if not parts:
        return None
    return Answer(
        figure="right answers of " + "; ".join(parts),
        conditions="tasks with exact answers, models trained here, not the authors' benchmarks",
        files=list(dict.fromkeys(files)),
    )


def cells_inside(results: Results) -> Answer | None:
    """C14: tasks by interval of length whose share of right answers lies inside the FP32 run's interval."""
    parts, files = [], []
    for name, model, runs, records in drift(results):
        inside = {label: drift_report.inside(records, record) for label, record in runs.items()}
        found, asked = inside[drift_report.STOCHASTIC]
        if asked:
            few, _ = drift_report.inside(records, runs[drift_report.STOCHASTIC], drift_report.FEW)
            parts.append(
                f"{model}: {found} of {asked}, {few} by intervals of {drift_report.FEW} answers "
                f"(shared NVFP4: {inside[drift_report.SHARED][0]})"
            )
            files.append(name)
    if not parts:
        return None
    return Answer(
        figure="NVFP4 read + FP8 stochastic inside in " + "; ".join(parts),
        conditions="tasks with exact answers by interval of position, 95 % intervals, models trained here",
        files=list(dict.fromkeys(files)),
    )


def forgetting(results: Results) -> Answer | None:
    """C15: shares of reads and writes that `skip_forgotten` leaves out, and times of steps."""
    parts, files = [], []
    for name, records in of_bench(results, "bench.forgotten_heads").items():
        for source in ("trained", "initialised"):
            mine = [r for r in records if r["source"] == source and r["buffer_length"] == 16]
            if mine:

                def span(field: str, mine: list[dict] = mine) -> str:
                    low, high = (100 * f(r[field] for r in mine) for f in (min, max))
                    return f"{low:.1f} to {high:.1f} %"

                lost, worst = (max(r[f"{kind}_bfloat16"] for r in mine) for kind in ("error", "worst"))
                parts.append(
                    f"{source}: {span('exact')} of reads left out exactly, {span('bfloat16')} by the "
                    f"bound for bfloat16 (outputs lose {lost:.1e} at most, one head's output at one "
                    f"step {worst:.2g}); writes {span('write_exact')} and {span('write_bounded')}"
                )
                files.append(name)
    for name, records in of_bench(results, "bench.forgotten_reads").items():
        times = {(r["skip"], r.get("forgotten")): r["time_us"] for r in records}
        if {("off", 0.0), ("exact", 0.0), ("exact", 0.5)} <= set(times):
            parts.append(
                f"a layer's step ({records[0]['shape']}, batch {records[0]['batch']}) takes "
                f"{times['off', 0.0]:.0f} us, with exact skips {times['exact', 0.0]:.0f} us where no head "
                f"forgets and {times['exact', 0.5]:.0f} us where half do"
            )
            files.append(name)
        for whole in (r for r in records if "forgotten" not in r and r["skip"] == "off"):
            models = (r for r in records if "forgotten" not in r and r["shape"] == whole["shape"])
            same = {r["skip"]: r["time_us"] for r in models}
            parts.append(
                f"{whole['shape']} cut to {whole['layers']} layers, decays as initialised, batch "
                f"{whole['batch']}: {same['off']:.0f} us a step, exact {same['exact']:.0f} us, bounded "
                f"{same['bounded']:.0f} us"
            )
            files.append(name)
    if not parts:
        return None
    return Answer(
        figure="; ".join(parts),
        conditions="L = 16; embedded models over held-out text, published sizes with decays as initialised",
        files=list(dict.fromkeys(files)),
    )


def costs(results: Results) -> Answer | None:
    """C16: a replay cache against an eager one in bytes, and the time of a flush that writes a copy too."""
    parts, files = [], []
    for name, records in of_bench(results, "bench.e2e_decode_speedup").items():
        for place, pair in e2e_report.pairs(records).items():
            if place.batch == 256 and place.plain and not place.depth_cut:
                more = pair["replay"]["cache_bytes"] / pair["eager"]["cache_bytes"] - 1
                parts.append(f"{place.shape}: cache {100 * more:.1f} % larger (context {place.context})")
                files.append(name)
    for shape in ("super", "q122"):
        fields = {"shape": shape, "batch": 256, "method": "replay", "op": "flush"}
        plain = pick(kernels(results), **fields, recurrence="fp32")
        copied = pick(kernels(results), **fields, recurrence="fp32", state="nvfp4")
        if plain and copied:
            times = f"{plain['time_us']:.0f} us, with an NVFP4 copy {copied['time_us']:.0f} us"
            parts.append(f"{shape}: a flush of all rows {times}")
            files += of_bench(results, "bench.kernel_decode")
    if not parts:
        return None
    return Answer(
        figure=", ".join(parts),
        conditions="batch 256, L = 16; whole caches; flush kernels",
        files=list(dict.fromkeys(files)),
    )


CLAIMS = (
    Claim(
        name="C1",
        claim="State traffic about halves: a non-flush step reads the checkpoint once and writes "
        "none, a flush reads "
        "and writes it",
        figure="1 read against 1 read + 1 write",
        conditions="any",
        answer=traffic,
    ),
    Claim(
        name="C2",
        claim="Outputs equal the eager recurrence to floating-point error",
        figure="rounding only",
        conditions="float32",
        answer=exactness,
    ),
    Claim(
        name="C3",
        claim="Speed-up of the SSM kernel, flush amortised, against vLLM's kernels tuned by a sweep",
        figure="1.46x to 1.80x",
        conditions="batch 256, four models, H100 / B300",
        answer=kernel_speedup,
    ),
    Claim(
        name="C4",
        claim="Speed-up of the whole decode step",
        figure="1.20x to 1.47x (Nano-4B 1.47x, Qwen3.5-4B 1.27x)",
        conditions="batch 256, four models, H100 / B300",
        answer=lambda results: whole_steps(results, (256, 512)),
    ),
    Claim(
        name="C5",
        claim="No gain at batch 1, where the eager kernel is far from the DRAM's peak",
        figure="0.96x to 0.99x",
        conditions="batch 1, H100 / B300",
        answer=one_row,
    ),
    Claim(
        name="C6",
        claim="From batch 128 on the eager kernel saturates and the kernel's gain levels off, "
        "while the whole step's "
        "keeps growing",
        figure="84 to 86 % of peak; kernel 1.4x to 1.8x",
        conditions="H100 / B300",
        answer=saturation,
    ),
    Claim(
        name="C7",
        claim="The whole step's gain is largest at short and medium contexts; attention dominates long ones",
        figure="SSM update still the bottleneck up to 100K tokens",
        conditions="Nemotron-3-Super NVFP4, batch 256, FP8 keys and values, B300",
        answer=contexts,
    ),
    Claim(
        name="C8",
        claim="Speculative decoding: throughput over vLLM's own, acceptance matched",
        figure="1.85x and 2.10x",
        conditions="two 120B models, GSM8K, T = 4, batch 512, head as drafter, B300",
        answer=speculation,
    ),
    Claim(
        name="C9",
        claim="Rollback moves a cursor; verification forms no intermediate state",
        figure="no state copy; 3.25x and 3.01x the requests fit",
        conditions="two 120B models, T = 4, B300",
        answer=rollback,
    ),
    Claim(
        name="C10",
        claim="The non-flush Mamba-2 kernel is faster on an NVFP4 copy of the state",
        figure="3.8x over reading float32",
        conditions="kernel alone",
        answer=low_precision_reads,
    ),
    Claim(
        name="C11",
        claim="A low-precision copy derived at each flush, never read back, keeps the recurrence "
        "exact: the output's "
        "divergence falls against a shared NVFP4 checkpoint",
        figure="KL 13x to 36x smaller at the longest generation",
        conditions="simulated quantisation, published weights",
        answer=divergence,
    ),
    Claim(
        name="C12",
        claim="Divergence from float32 decoding at 128K tokens, shared NVFP4 against NVFP4 reads",
        figure="KL 0.136 falls to 0.0038",
        conditions="Qwen3.5-4B, PG-19",
        answer=divergence,
    ),
    Claim(
        name="C13",
        claim="Task accuracy with a shared NVFP4 checkpoint and with NVFP4 reads + FP16 or FP8 "
        "recurrence, stochastic "
        "rounding",
        figure="loses 3 to 31 points; within about 2 for three of four models",
        conditions="GPQA-Diamond, four models",
        answer=right_answers,
    ),
    Claim(
        name="C14",
        claim="Accuracy by interval of length",
        figure="inside the float32 interval in 41 of 48; shared NVFP4 up to 28.2 points behind",
        conditions="MMLU-Pro, GPQA-Diamond",
        answer=cells_inside,
    ),
    Claim(
        name="C15",
        claim="Heads that have forgotten can skip the checkpoint's read, and flush by a pure write",
        figure="a sketch",
        conditions="not built by the authors",
        answer=forgetting,
    ),
    Claim(
        name="C16",
        claim="Costs: the ring is kept; with separate precision a flush writes the copy too",
        figure="-",
        conditions="any",
        answer=costs,
    ),
)


def document(results: Results) -> str:
    """The text of CLAIMS.md."""
    header = ["", "claim", "authors", "conditions", "here", "conditions", "result files"]
    rows, used = [], []
    for claim in CLAIMS:
        theirs = [claim.name, claim.claim, claim.figure, claim.conditions]
        answer = claim.answer(results)
        if answer is None:
            rows.append([*theirs, "open", "", ""])
            continue
        used += answer.files
        conditions = f"{device(results, answer.files)}; {answer.conditions}"
        rows.append([*theirs, answer.figure, conditions, ", ".join(f"`{name}`" for name in answer.files)])
    commands = []
    for name in sorted(set(used)):
        head = results[name]
        note = f" {head['note']}" if head.get("note") else ""
        commands.append(f"- `{name}` (commit {head['commit']}): `{head['command']}`{note}")
    return "\n".join(
        [
            "# Claims",
            "",
            "What the authors of ReplaySSM report (float32 states and L = 16 unless a row "
            "says otherwise; 4B models with",
            "bfloat16 weights on one H100, 120B models with 4-bit weights on one B300), "
            "and what the result files of this",
            "project say. Written by `python -m bench.claims`.",
            "",
            rows_of_table(header, rows),
            "",
            "Commands, by result file in `bench/results/`:",
            "",
            *commands,
            "",
        ]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=result_file.RESULTS.parent / "CLAIMS.md")
    options = parser.parse_args()
    options.out.write_text(document(load()))


if __name__ == "__main__":
    main()

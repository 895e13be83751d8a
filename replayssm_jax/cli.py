"""The command line: `replayssm generate`, `replayssm info` and `replayssm convert`."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from replayssm_jax.config import ReplayConfig

DEFAULT_MODEL = "tiny-nemotron-h"
SOURCE = "checkpoint directory, embedded name or Hugging Face hub name"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.

    arguments: those after the program's name; None means the process's.
    Status 0: done. 2: an error, said in one sentence on stderr. 130: interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe has seen enough. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ArithmeticError) as problem:
        print(f"replayssm: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line instead of after the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="replayssm", description="Decode hybrid language models with ReplaySSM.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="continue a prompt")
    command.set_defaults(run=_generate)
    command.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    command.add_argument("--model", default=DEFAULT_MODEL, help=f"{SOURCE}; default {DEFAULT_MODEL}")
    _add_cache_options(command)
    command.add_argument(
        "--mode", choices=("replay", "eager"), default="replay", help="how the state is kept; default replay"
    )
    command.add_argument(
        "--draft",
        metavar="DRAFTER",
        help="decode speculatively: mtp (the checkpoint's own head), ngram, or a smaller model's name",
    )
    command.add_argument(
        "--draft-tokens", type=int, metavar="N", help="tokens drafted a step with --draft; default 4"
    )
    command.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest of mass P")
    command.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="keep tokens P times as likely as the best"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random numbers; default 0")
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    command.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    output = command.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print text while it is made")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="keep no compiled programs in the user's cache directory",
    )

    command = commands.add_parser("info", help="sizes of a checkpoint and of its decoding cache")
    command.set_defaults(run=_info)
    command.add_argument("source", metavar="DIR", help=SOURCE)
    _add_cache_options(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")

    command = commands.add_parser("convert", help="write a checkpoint as an Orbax directory")
    command.set_defaults(run=_convert)
    command.add_argument("source", metavar="SRC", help=SOURCE)
    command.add_argument("destination", metavar="DST", help="directory to write")
    return parser


def _add_cache_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--buffer-length", type=int, default=16, metavar="L", help="inputs between checkpoints; default 16"
    )
    for name, kept in (("recurrence", "the state"), ("read", "the copy of it that outputs read")):
        command.add_argument(
            f"--{name}",
            default="fp32",
            metavar="FORMAT",
            help=f"of {kept}: fp32 (default), bf16, fp16, fp8_e4m3 or nvfp4",
        )
    command.add_argument(
        "--rounding", default="nearest", metavar="HOW", help="of the state: nearest (default) or stochastic"
    )
    command.add_argument("--max-length", type=int, metavar="N", help="positions of a sequence")
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations; default float32 on a CPU, else as stored",
    )


def _replay(options: argparse.Namespace) -> "ReplayConfig":
    from replayssm_jax.config import ReplayConfig

    return ReplayConfig(
        buffer_length=options.buffer_length,
        recurrence=options.recurrence,
        read=options.read,
        rounding=options.rounding,
    )


def _generate(options: argparse.Namespace) -> None:
    if not options.no_compilation_cache:
        _keep_compiled_programs()
    from replayssm_jax.api import load
    from replayssm_jax.generate import generate, stream
    from replayssm_jax.sampling import Sampling

    # Options are checked before a checkpoint is read.
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop_strings=options.stop,
    )
    replay = _replay(options) if options.mode == "replay" else None
    speculative = _speculative(options, replay)
    loaded = load(options.model, dtype=options.dtype, mtp=options.draft == "mtp")
    if loaded.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer, which a text prompt needs.")
    prompt = _chat(loaded.tokenizer, options.prompt) if options.chat else options.prompt
    how = {"replay": replay, "speculative": speculative, "max_length": options.max_length}
    if options.stream:
        pieces = stream(loaded, [prompt], sampling, **how)
        try:
            while True:
                print(next(pieces).text, end="", flush=True)
        except StopIteration as end:
            print()
            _report(end.value.stats, speculative)
        return
    out = generate(loaded, [prompt], sampling, **how)
    text = out.text[0] if out.text else ""
    if options.json:
        report = {
            "text": text,
            "tokens": out.tokens[0],
            "logprobs": out.logprobs[0],
            "finish_reason": out.finish_reasons[0],
            "stats": dataclasses.asdict(out.stats),
        }
        print(json.dumps(report))
        return
    print(text)
    _report(out.stats, speculative)


def _speculative(options: argparse.Namespace, replay: Any) -> Any:
    """What --draft and --draft-tokens ask for, checked against the cache's options."""
    from replayssm_jax.api import load
    from replayssm_jax.drafters import NAMES, Speculative, with_window

    if options.draft is None:
        if options.draft_tokens is not None:
            raise ValueError("--draft-tokens needs --draft.")
        return None
    drafter = options.draft if options.draft in NAMES else load(options.draft, dtype=options.dtype, mtp=False)
    count = {} if options.draft_tokens is None else {"draft_tokens": options.draft_tokens}
    speculative = Speculative(drafter, **count)
    with_window(replay, speculative)
    return speculative


def _report(stats: Any, speculative: Any) -> None:
    """Say how fast it was, to a terminal; with drafts, how they fared, in any case."""
    parts = []
    if sys.stderr.isatty():
        parts.append(f"{stats.tokens} tokens, {stats.tokens_per_second:.0f} a second")
    if speculative is not None:
        parts.append(
            f"{stats.tokens_per_step:.2f} tokens a step, {stats.draft_acceptance:.0%} of drafts accepted, "
            f"{stats.flush_rate:.0%} of steps flush, {stats.ring_occupancy:.1f} ring entries read a step"
        )
    if parts:
        print(f"[{'; '.join(parts)}]", file=sys.stderr)


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a conversation of one message that waits for its answer."""
    if not tokenizer.chat_template:
        raise ValueError("--chat needs a chat template, but the checkpoint's tokenizer has none.")
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _keep_compiled_programs() -> None:
    """Let JAX keep compiled programs in the user's cache directory, unless it has a directory set already."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    root = os.environ.get("XDG_CACHE_HOME")
    root = Path(root) if root and os.path.isabs(root) else Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(root / "replayssm_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _info(options: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp

    from models.checkpoint import abstract_model, mtp_parameter_count, parameter_count, read_config
    from models.config import without_mtp
    from models.sources import resolve_source
    from replayssm_jax.cache import cache_bytes
    from replayssm_jax.config import PRECISIONS

    replay = _replay(options)
    if options.max_length is not None and options.max_length < 1:
        raise ValueError(f"max_length must be an integer of at least 1, got {options.max_length}.")
    path = resolve_source(options.source)
    config = read_config(path)
    dtype = jnp.dtype(options.dtype or ("float32" if jax.default_backend() == "cpu" else config.param_dtype))
    max_length = options.max_length or config.max_position_embeddings
    specs = abstract_model(without_mtp(config), dtype).cache_specs()
    report = {
        "path": str(path),
        "parameters": parameter_count(config),
        "mtp_parameters": mtp_parameter_count(config),
        "vocab_size": config.vocab_size,
        "dtype": dtype.name,
        "max_length": max_length,
        "buffer_length": options.buffer_length,
        "recurrence": replay.recurrence,
        "read": replay.read,
        "bytes_per_sequence": {
            "eager": cache_bytes(specs, max_length, None, dtype),
            "replay": cache_bytes(specs, max_length, replay, dtype),
        },
        "bytes_by_precision": {
            f"{recurrence}/{read}": cache_bytes(
                specs,
                max_length,
                dataclasses.replace(replay, recurrence=recurrence, read=read, rounding="nearest"),
                dtype,
            )
            for recurrence, read in PRECISIONS
        },
    }
    if config.mtp is not None and config.mtp.unsupported:
        report["mtp_unsupported"] = config.mtp.unsupported
    if options.json:
        print(json.dumps(report))
        return
    sizes, by_precision = report.pop("bytes_per_sequence"), report.pop("bytes_by_precision")
    for name, value in report.items():
        print(f"{name:15} {value:,}" if isinstance(value, int) else f"{name:15} {value}")
    for mode, parts in sizes.items():
        listed = ", ".join(f"{name} {count:,}" for name, count in parts.items())
        print(f"{mode:15} bytes a sequence: {listed}")
    for formats, parts in by_precision.items():
        recurrence, read = formats.split("/")
        copy = f", copy {parts['copy']:,}" if recurrence != read else ""
        print(
            f"recurrence {recurrence:8} read {read:8} bytes a sequence: checkpoint {parts['checkpoint']:,}"
            f"{copy}, total {parts['total']:,}"
        )


def _convert(options: argparse.Namespace) -> None:
    from replayssm_jax.api import convert

    print(convert(options.source, options.destination))


if __name__ == "__main__":
    sys.exit(main())

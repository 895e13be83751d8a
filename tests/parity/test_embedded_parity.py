"""transformers loads the embedded checkpoints and gives our logits, texts and tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from tests.models.test_embedded import NAMES, UNSEEN

pytestmark = pytest.mark.parity

# On logits of scale 20; the random checkpoints allow 5e-5 and 5e-4 on logits of scale 5.
TOLERANCE = {"tiny-nemotron-h": 2e-4, "tiny-qwen3.5": 5e-4}


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    import torch
    from transformers import AutoModelForCausalLM

    ours = rs.load(request.param, dtype=jnp.float32)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        ours.path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return request.param, ours, theirs.eval()


def test_tokens(pair):
    from transformers import AutoTokenizer

    name, ours, _ = pair
    theirs = AutoTokenizer.from_pretrained(ours.path)
    assert theirs(UNSEEN)["input_ids"] == ours.tokenizer(UNSEEN)["input_ids"]
    assert theirs.eos_token_id == 0 and theirs.pad_token_id == 0


def test_logits(pair):
    """With the bound on dt that transformers' Nemotron-H prefill has: no dt of these weights reaches it."""
    from tests.parity.reference import full_logits

    name, ours, theirs = pair
    tokens = np.asarray([ours.tokenizer(UNSEEN)["input_ids"]], np.int32)
    logits = jax.jit(lambda model, tokens: model.logits(model.forward(tokens)))(ours.model, tokens)
    np.testing.assert_allclose(logits, full_logits(theirs, tokens), rtol=0, atol=TOLERANCE[name])


@pytest.mark.parametrize("prompt", ["KING HENRY.\nWhat say", "import os\n\ndef main("])
def test_greedy_text(pair, prompt):
    from tests.parity.reference import greedy

    _, ours, theirs = pair
    ids = ours.tokenizer(prompt)["input_ids"]
    expected, _ = greedy(theirs, np.asarray([ids]), 256)
    out = rs.generate(ours, [ids], rs.Sampling(max_new_tokens=256), replay=rs.ReplayConfig(buffer_length=16))
    tokens = [int(token) for token in out.tokens[0]]
    assert tokens == expected[0].tolist()[: len(tokens)]
    assert len(tokens) == 256 or tokens[-1] == 0

"""B13 live: a multimodal Qwen3.5 checkpoint as transformers saves it; its text model is what we load."""

import numpy as np
import pytest

from replayssm_jax.api import load
from tests.models.tiny import GDN
from tests.parity.cases import followed, tolerance

pytestmark = pytest.mark.parity

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": GDN["hidden_size"],
    "patch_size": 2,
    "num_position_embeddings": 16,
}


def test_b13_the_text_of_a_multimodal_checkpoint(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    from tests.parity.reference import full_logits

    torch.manual_seed(0)
    text = {key: value for key, value in GDN.items() if key not in ("architectures", "model_type")}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    both = Qwen3_5ForConditionalGeneration(config)
    for parameter in both.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    both.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.arange(20) % 97
    logits = followed(load(tmp_path).model, [prompt], np.zeros((1, 1), np.int64), None)
    np.testing.assert_allclose(
        logits[0, 0], full_logits(theirs, prompt[None])[0, -1], rtol=0, atol=tolerance("qwen")
    )

"""Multi-token-prediction heads against layers of transformers, which drops the heads of these families.

Behind its two norms and its projection a head is a text model of its own few layers: the classes of
transformers run them from the projected inputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint import load_model
from replayssm_jax.replay import fresh_segment
from tests.models.tiny import GDN_MTP, M2_MTP, tensors, write
from tests.parity.cases import tolerance

pytestmark = pytest.mark.parity

TEXT = 37


def rms_norm(weight: np.ndarray, x, eps: float, offset: float):
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], offset + torch.tensor(weight), eps)


def head_of_transformers(raw: dict, weights: dict[str, np.ndarray]):
    """A function of next tokens' embeddings and trunk hidden states that returns normed outputs."""
    import torch
    from transformers import NemotronHConfig, NemotronHModel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextModel

    plain = {key: value for key, value in raw.items() if key not in ("architectures", "model_type")}
    nemotron = raw["model_type"] == "nemotron_h"
    if nemotron:
        letters = raw["mtp_hybrid_override_pattern"]
        config = NemotronHConfig(**plain | {"hybrid_override_pattern": letters})
        model, names = NemotronHModel(config), ("enorm", "hnorm", "eh_proj")
        first, last = (
            "mtp.layers.0.",
            {f"mtp.layers.{len(letters) - 1}.final_layernorm.weight": "norm_f.weight"},
        )
        eps, offset = raw["layer_norm_epsilon"], 0.0
    else:
        config = Qwen3_5TextConfig(**plain | {"layer_types": ["full_attention"], "num_hidden_layers": 1})
        model, names = Qwen3_5TextModel(config), ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
        first, last, eps, offset = "mtp.", {}, raw["rms_norm_eps"], 1.0
    embed_norm, hidden_norm, proj = (weights[f"{first}{name}.weight"] for name in names)
    taken = {f"{first}{name}.weight" for name in names}
    state = {
        last.get(name, name.removeprefix("mtp.")): torch.tensor(value)
        for name, value in weights.items()
        if name.startswith("mtp.") and name not in taken
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (unexpected, [name for name in missing if "embed" not in name]) == ([], [])
    model.config._attn_implementation = "eager"
    model.eval()

    def run(embedded, hidden):
        halves = rms_norm(embed_norm, embedded, eps, offset), rms_norm(hidden_norm, hidden, eps, offset)
        inputs = torch.cat(halves, dim=-1) @ torch.tensor(proj).T
        return model(inputs_embeds=inputs, use_cache=False).last_hidden_state

    return run


@pytest.mark.parametrize(("family", "raw"), [("nemotron", M2_MTP), ("qwen", GDN_MTP)])
def test_the_head_behind_the_trunk_of_transformers(family, raw, tmp_path):
    import torch

    from tests.parity.reference import reference

    trunk, _ = reference(tmp_path, raw)
    weights = tensors(raw)
    text = np.random.RandomState(3).randint(0, raw["vocab_size"], (2, TEXT + 1))
    with torch.no_grad():
        out = trunk(input_ids=torch.tensor(text[:, :-1]), use_cache=False, output_hidden_states=True)
        embedded = trunk.get_input_embeddings()(torch.tensor(text[:, 1:]))
        theirs = head_of_transformers(raw, weights)(embedded, out.hidden_states[-1])
        logits = trunk.get_output_embeddings()(theirs).numpy()

    @jax.jit
    def ours(model, tokens):
        hidden = model.forward(tokens[:, :-1])
        outputs, _ = model.mtp(model.embed(tokens[:, 1:]), hidden, fresh_segment(2, TEXT), None)
        return outputs, model.logits(outputs)

    found = ours(load_model(write(tmp_path / "ours", raw, weights)), jnp.asarray(text, jnp.int32))
    for mine, other in zip(found, (theirs.numpy(), logits), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2 * tolerance(family))

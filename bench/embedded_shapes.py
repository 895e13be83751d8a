"""The `config.json` of the two embedded checkpoints."""

CONTEXT = 4096
END_OF_TEXT_ID = 0

_COMMON = {
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 256,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
    "use_cache": True,
}

CONFIGS = {
    "tiny-nemotron-h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **_COMMON,
        "hybrid_override_pattern": "M-M-M*-M-M-",
        "num_hidden_layers": 11,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 448,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 2,
        "ssm_state_size": 64,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "expand": 2,
        "chunk_size": 64,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "tiny-qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_COMMON,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    },
}

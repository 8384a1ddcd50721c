"""A small random Llama: the embedded suite's target before it has learned anything."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(
    *,
    vocab_size: int,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 2048,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Random weights by ``seed``; the global random state is left as it was.

    The model names no end token: pass ``eos_ids`` to ``Target.from_model``.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        # Wider than HuggingFace's 0.02: so narrow a model copies names late or never with that.
        initializer_range=hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)

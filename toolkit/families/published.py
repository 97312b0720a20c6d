"""Sizes of well-known models, as their authors published them: reference points for counts, plans and tests."""

from __future__ import annotations

from toolkit.config.schema import ModelConfig

PUBLISHED: dict[str, ModelConfig] = {
    "gpt2": ModelConfig(
        family="gpt2", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, vocab_size=50257, max_position_embeddings=1024),
    "llama-2-7b": ModelConfig(
        family="llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
        max_position_embeddings=4096),
    "llama-3-8b": ModelConfig(
        family="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0),
    "qwen2-7b": ModelConfig(
        family="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=131072),
    "mixtral-8x7b": ModelConfig(
        family="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=32768, num_local_experts=8, num_experts_per_tok=2),
}

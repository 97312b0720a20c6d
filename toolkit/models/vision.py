"""A vision transformer for images with any number of bands: ``model.target=toolkit.models.vision.vit``."""

from __future__ import annotations

from torch import nn


def vit(
    *,
    bands: int = 12,
    image_size: int = 64,
    patch_size: int = 8,
    classes: int = 10,
    hidden_size: int = 192,
    intermediate_size: int | None = None,
    num_hidden_layers: int = 6,
    num_attention_heads: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """transformers' ViT (Dosovitskiy et al., 2010.11929) with a linear layer on its class token.

    Args:
        bands, image_size: of the square images.
        patch_size: height and width of the patches that become tokens; divides ``image_size``.
        intermediate_size: width of the feed-forward layer; 4 x ``hidden_size`` by default.
    """
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_channels=bands,
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 4 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config.num_labels = classes
    return ViTForImageClassification(config)

"""Adapters for the layers that quasidiag knows, one kind of layer in each file. See :mod:`quasidiag.layers.base`."""

from quasidiag.layers import (
    attention,
    bilinear,
    conv,
    embedding,
    linear,
    norm,
    recurrent,
    transposed,
)
from quasidiag.layers.base import Adapter, adapter_of, register_layer
from quasidiag.layers.composite import Composite

__all__ = [
    "Adapter",
    "Composite",
    "adapter_of",
    "attention",
    "bilinear",
    "conv",
    "embedding",
    "linear",
    "norm",
    "recurrent",
    "register_layer",
    "transposed",
]

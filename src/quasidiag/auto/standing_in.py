"""A model that is run once more with other parameters, and with kernels that have a forward mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quasidiag.auto.directions import Direction


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Use slower kernels, made of operations that have a forward mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32")  # said whenever a flag of oneDNN is set
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.mkldnn.flags(enabled=False),
            torch.backends.cudnn.flags(enabled=False),
        ):
            yield


@contextmanager
def standing_in(
    module: nn.Module, parameters: Direction, copy: Callable[[Tensor], Tensor] = Tensor.clone
) -> Iterator[None]:
    """Put ``parameters`` in the place of a module's own, and a copy in the place of each buffer, in all its submodules."""
    copies: dict[Tensor, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    for inner in module.modules():
        for name, p in inner._parameters.items():
            if p is not None and p in parameters:
                places.append((inner._parameters, name, p, parameters[p]))
        for name, b in inner._buffers.items():
            if b is not None:
                copies[b] = copies[b] if b in copies else copy(b)
                places.append((inner._buffers, name, b, copies[b]))
    try:
        for table, name, _, other in places:
            table[name] = other
        yield
    finally:
        for table, name, own, _ in places:
            table[name] = own


def doubled(buffer: Tensor) -> Tensor:
    """A copy, in float64 unless it holds integers."""
    return buffer.to(torch.float64 if buffer.is_floating_point() else buffer.dtype, copy=True)

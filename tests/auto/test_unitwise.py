"""The unitwise reduction without a learning rate."""

from __future__ import annotations

import pytest
from handwritten import digits, network, train

import quasidiag as qd


@pytest.mark.parametrize("seed", [0, 3])
def test_inputs_that_hardly_vary_do_not_spoil_it(seed: int) -> None:
    """Without bounds the blocks are nearly singular: steps spiked, and eigenvalues were not found."""
    optimizer = qd.Riemannian(network(seed), qd.Categorical(), reduction="unitwise")
    losses = train(optimizer, *digits(), 150, seed)
    assert max(losses) < 1.5 * losses[0] and sum(losses[-10:]) / 10 < 0.05

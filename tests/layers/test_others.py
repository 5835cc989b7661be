"""What nobody registered: the diagonal rule, with one warning that names it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd


class Bare(nn.Module):
    """A parameter of its own, a layer that nobody knows, and one that everybody does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.odd = nn.PReLU(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.odd(x * self.scale))


@pytest.mark.parametrize("metric", ["outer-product", "monte-carlo", "exact"])
def test_bare_parameters_follow_adagrad(metric: str) -> None:
    model, loss = Bare(), qd.Categorical()
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="diagonal rule") as told:
        optimizer = qd.Riemannian(model, loss, lr=0.1, metric=metric, gamma=0.2)
    assert len(told) == 1
    message = str(told[0].message)
    assert "odd.weight (PReLU)" in message
    assert "scale (Bare)" in message
    assert "Linear" not in message
    bare = qd.AdaGrad([twin.scale, twin.odd.weight], lr=0.1, gamma=0.2)
    for _ in range(5):
        x, t = torch.randn(6, 4), torch.randint(3, (6,))
        twin.head.load_state_dict(model.head.state_dict())
        for net, opt in ((model, optimizer), (twin, bare)):
            net.zero_grad()
            loss(net(x), t).backward()
            opt.step()
        torch.testing.assert_close(model.scale, twin.scale)
        torch.testing.assert_close(model.odd.weight, twin.odd.weight)


def test_known_layers_give_no_warning() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4),
        nn.LSTM(4, 4, num_layers=2, bidirectional=True),
        nn.Linear(4, 4),
        nn.Conv2d(1, 2, 2),
        nn.ConvTranspose1d(1, 2, 2),
        nn.BatchNorm2d(2),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2),
        nn.Bilinear(2, 2, 2),
        nn.RMSNorm(4),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qd.QDOP(model, lr=0.1).close()


def test_a_learned_deviation_is_unaffected_by_the_layers() -> None:
    model, loss = nn.Conv1d(2, 3, 2), qd.LearnedGaussian((3, 4))
    x, t = torch.randn(5, 2, 5), torch.randn(5, 3, 4)
    optimizer = qd.Riemannian(model, loss, lr=0.1, metric="exact", sharing="exact")
    before = loss.log_std.detach().clone()
    loss(model(x), t).backward()
    gradient = loss.log_std.grad.clone()
    optimizer.step()
    torch.testing.assert_close(loss.log_std, before - 0.1 * gradient / (2 + 1e-8))


@pytest.mark.parametrize("lr", [None, 0.01])
def test_a_layer_that_gets_no_samples_at_first(lr: float | None) -> None:
    """An expert that none of the first minibatch's samples go to."""
    torch.manual_seed(0)
    model, loss = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double(), qd.Categorical()

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = model

        def forward(self, x: Tensor) -> Tensor:
            second = x[:, 0] > 0
            y = torch.empty(len(x), 3, dtype=x.dtype)
            for chosen, expert in zip((~second, second), self.experts, strict=True):
                y[chosen] = expert(x[chosen])
            return y

    net = Experts()
    optimizer = qd.Riemannian(net, loss, lr=lr)
    for k in range(6):
        x = torch.randn(60, 4, dtype=torch.float64)
        x[:, 0] = -x[:, 0].abs() if k == 0 else x[:, 0]
        optimizer.zero_grad()
        loss(net(x), (x[:, 1] > 0).long()).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in net.parameters())
    assert all(m.isfinite().all() for m in optimizer.moments(model[1]) if m is not None)

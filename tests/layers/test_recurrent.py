"""RNN, LSTM and GRU: the re-run against torch's own kernels, float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import CLOSE, METRICS, assert_close, moments, sample_gradients, step, unit_of, vectors
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import quasidiag as qd
from quasidiag.layers.base import known_adapter
from quasidiag.units import find_units

N, T, IN, HIDDEN = 3, 4, 3, 2
KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
CELLS = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2, "batch_first": True},
    "both ways": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.4},
    "without bias": {"bias": False},
}


class Sequence(nn.Module):
    """A recurrent layer under a head that sees its outputs, its last state, or both. Batch first outside."""

    def __init__(self, layer: nn.RNNBase, sees: str = "both", state: bool = False) -> None:
        super().__init__()
        ways = 2 if layer.bidirectional else 1
        size = getattr(layer, "proj_size", 0) or layer.hidden_size
        inputs = {"outputs": T * ways * size, "state": ways * layer.num_layers * size}
        inputs["both"] = sum(inputs.values())
        self.layer, self.head, self.sees = layer, nn.Linear(inputs[sees], 3), sees
        shape = (ways * layer.num_layers, N, size)
        self.register_buffer("h0", torch.randn(shape) if state else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        hx: Any = self.h0
        if hx is not None and isinstance(self.layer, nn.LSTM):
            hx = (hx, hx[..., :1].expand(*hx.shape[:2], self.layer.hidden_size) * 0.5)
        out, last = self.layer(x) if hx is None else self.layer(x, hx=hx)
        out = out if self.layer.batch_first else out.transpose(0, 1)
        last = last[0] if isinstance(last, tuple) else last
        parts = {"outputs": [out], "state": [last.transpose(0, 1)]}
        parts["both"] = parts["outputs"] + parts["state"]
        return self.head(torch.cat([p.flatten(1) for p in parts[self.sees]], 1))


def pairs(layer: nn.Module) -> list[tuple[str, Tensor, Tensor | None]]:
    """Every weight, with its bias if there is one."""
    return [
        (name, p, getattr(layer, name.replace("weight", "bias", 1), None))
        for name, p in layer.named_parameters()
        if name.startswith("weight")
    ]


def assert_sample_moments(
    optimizer: qd.Riemannian, layer: nn.Module, y: Tensor, vs: list[Tensor]
) -> None:
    for name, weight, bias in pairs(layer):
        parameters = [weight] if bias is None else [weight, bias]
        found = sample_gradients(y, vs, parameters)
        expected = moments(found, N, unit_of(layer, weight), bias is not None)
        try:
            assert_close(optimizer.moments(weight), expected)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_sharing_is_torch_s_own_gradient_of_each_sample(
    kind: str, layout: str, metric: str
) -> None:
    model = Sequence(KINDS[kind](IN, HIDDEN, **LAYOUTS[layout]))
    x, t, loss = torch.randn(N, T, IN), torch.randint(3, (N,)), qd.Categorical()
    torch.manual_seed(7)  # the dropout masks
    optimizer, drawn = step(model, x, t, loss, metric, sharing="exact", samples=2)
    torch.manual_seed(7)
    y = model(x)
    assert_sample_moments(optimizer, model.layer, y, vectors(metric, loss, y, t, drawn))


@pytest.mark.parametrize("sees", ["outputs", "state"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_on_outputs_or_on_the_last_state_alone(kind: str, sees: str) -> None:
    model = Sequence(KINDS[kind](IN, HIDDEN, batch_first=True), sees, state=True)
    x, t, loss = torch.randn(N, T, IN), torch.randint(3, (N,)), qd.Categorical()
    for metric in ("outer-product", "exact"):
        optimizer, _ = step(model, x, t, loss, metric, sharing="exact")
        y = model(x)
        assert_sample_moments(optimizer, model.layer, y, vectors(metric, loss, y, t, []))
        model.zero_grad()


def test_relu_and_projections() -> None:
    for layer in (
        nn.RNN(IN, HIDDEN, nonlinearity="relu"),
        nn.LSTM(IN, 4, proj_size=2, num_layers=2),
    ):
        model = Sequence(layer, state=True)
        x, t, loss = torch.randn(N, T, IN), torch.randint(3, (N,)), qd.Categorical()
        optimizer, _ = step(model, x, t, loss, "exact", sharing="exact")
        y = model(x)
        assert_sample_moments(optimizer, layer, y, vectors("exact", loss, y, t, []))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_time_step_is_one_more_occurrence(kind: str, metric: str) -> None:
    """Brute force: torch's cell with weights of its own for every sample and step."""
    layer = KINDS[kind](IN, HIDDEN)
    model = Sequence(layer, "outputs")
    x, t, loss = torch.randn(N, T, IN), torch.randint(3, (N,)), qd.Categorical()
    optimizer, drawn = step(model, x, t, loss, metric, samples=2)

    cell = CELLS[kind](IN, HIDDEN)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    own = {
        (n, s): {k: getattr(layer, f"{k}_l0").detach().clone().requires_grad_() for k in names}
        for n in range(N)
        for s in range(T)
    }
    rows = []
    for n in range(N):
        state: Any = None
        outs = []
        for s in range(T):
            state = functional_call(cell, own[n, s], (x[n : n + 1, s], state))
            outs.append(state[0] if isinstance(state, tuple) else state)
        rows.append(model.head(torch.cat(outs, 1)))
    y = torch.cat(rows)
    torch.testing.assert_close(y, model(x), **CLOSE)
    for part in ("ih", "hh"):
        found = [
            torch.autograd.grad(
                y, [copy[f"weight_{part}"], copy[f"bias_{part}"]], u, retain_graph=True
            )
            for u in vectors(metric, loss, y, t, drawn)
            for copy in own.values()
        ]
        weight = getattr(layer, f"weight_{part}_l0")
        expected = moments(found, N, unit_of(layer, weight))  # type: ignore[arg-type]
        assert_close(optimizer.moments(weight), expected)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", CELLS)
def test_cells_in_a_loop_of_one_s_own(kind: str, metric: str) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = CELLS[kind](IN, HIDDEN), nn.Linear(HIDDEN, 3)

        def forward(self, x: Tensor) -> Tensor:
            state: Any = None
            for s in range(T):
                state = self.layer(x[:, s], state)
            return self.head(state[0] if isinstance(state, tuple) else state)

    model, x, t, loss = Loop(), torch.randn(N, T, IN), torch.randint(3, (N,)), qd.Categorical()
    optimizer, drawn = step(model, x, t, loss, metric, sharing="exact", samples=2)
    y = model(x)
    assert_sample_moments(optimizer, model.layer, y, vectors(metric, loss, y, t, drawn))


class Encoded(nn.Module):
    """A dense layer at every position, a recurrent one, and a head at every position."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(IN, IN), nn.Linear(HIDDEN, 3)
        self.layer = KINDS[kind](IN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.inner(x).tanh())[0])


@pytest.mark.parametrize("metric", ["outer-product", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_sharing_is_exact_in_recurrent_layers_alone(kind: str, metric: str) -> None:
    torch.manual_seed(0)
    model, x, t = Encoded(kind), torch.randn(N, T, IN), torch.randint(3, (N, T))
    ways = {
        way: step(model, x, t, qd.Categorical(), metric, sharing=way)[0]
        for way in ("recurrent", "expand", "exact")
    }
    for name, weight in model.named_parameters():
        if "weight" in name:
            like = "exact" if name.startswith("layer") else "expand"
            got, expected = (ways[way].moments(weight) for way in ("recurrent", like))
            assert_close(got, expected)
            other = ways["expand" if like == "exact" else "exact"].moments(weight)
            assert not torch.allclose(got.mii, other.mii, rtol=1e-3)


def test_recurrent_sharing_is_the_default_of_the_step_without_a_learning_rate() -> None:
    model = Encoded("LSTM")
    assert qd.Riemannian(model, qd.Categorical()).sharing == "recurrent"
    assert qd.Riemannian(model, qd.Categorical(), sharing="expand").sharing == "expand"
    assert qd.Riemannian(model, qd.Categorical(), lr=0.1).sharing == "expand"
    assert qd.Riemannian(model, qd.Categorical(), metric="exact").sharing == "expand"
    chain = nn.Sequential(nn.Linear(IN, 3))
    assert qd.Riemannian(chain, qd.Categorical(), metric="backpropagated").sharing == "recurrent"


def test_a_state_is_measured_from_zero_and_an_input_from_its_mean() -> None:
    model, x, t = Encoded("GRU"), torch.randn(N, T, IN) + 3, torch.randint(3, (N, T))
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=0.0)
    for _ in range(20):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    assert optimizer.state[model.layer.weight_ih_l0]["shift"].any()
    assert "shift" not in optimizer.state[model.layer.weight_hh_l0]


def test_which_inputs_are_states() -> None:
    for module in (nn.LSTM(IN, HIDDEN, num_layers=2, proj_size=1), nn.GRUCell(IN, HIDDEN)):
        parts = known_adapter(module).parts(module)  # type: ignore[attr-defined]
        assert {name for name, part in parts.items() if part.state} == {
            name for name in parts if name.startswith("hh")
        }


@pytest.mark.parametrize("options", [{"metric_fraction": 0.5}, {"samples": 2}], ids=str)
def test_recurrent_sharing_with_other_options(options: dict[str, Any]) -> None:
    model, loss = Encoded("GRU"), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, **options)
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model(torch.randn(8, T, IN)), torch.randint(3, (8, T)))
        value.backward()
        optimizer.step()
    assert value.isfinite()


class Shorter(nn.Module):
    """A cell in a loop in which one of the sequences ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRUCell(IN, HIDDEN), nn.Linear(HIDDEN, 3)
        self.late = self.layer

    def forward(self, x: Tensor) -> Tensor:
        state, ended = None, None
        for s in range(T):
            if s == 2:
                assert state is not None
                state, ended = state[:-1], state[-1:]
            state = (self.layer if s < 2 else self.late)(x[: N - (s >= 2), s], state)
        return self.head(torch.cat([state, ended]))


def test_calls_on_different_numbers_of_sequences_are_different_samples() -> None:
    model, x, t, loss = Shorter(), torch.randn(N, T, IN), torch.randint(3, (N,)), qd.Categorical()
    optimizer, _ = step(model, x, t, loss, "outer-product", sharing="recurrent")
    model.late = copy.deepcopy(model.layer)  # the same numbers, so that each part has its gradient
    y = model(x)
    for name in ("ih", "hh"):
        parts = [
            [getattr(cell, f"{kind}_{name}") for kind in ("weight", "bias")]
            for cell in (model.layer, model.late)
        ]
        found = [
            list(torch.autograd.grad((y[n] * u[n]).sum(), part, retain_graph=True))
            for u in vectors("outer-product", loss, y, t, [])
            for part, sequences in zip(parts, (N, N - 1))
            for n in range(sequences)
        ]
        weight = parts[0][0]
        assert_close(optimizer.moments(weight), moments(found, N, unit_of(model.layer, weight)))
    with pytest.raises(ValueError, match="needs the samples apart"):
        step(Shorter(), x, t, loss, "outer-product", sharing="exact")


def test_a_weight_that_a_dense_layer_has_too_counts_positions() -> None:
    """What is no recurrent layer need not have its samples apart."""
    model = nn.ModuleDict({"cell": nn.RNNCell(IN, HIDDEN), "dense": nn.Linear(IN, HIDDEN)})
    model["dense"].weight = model["cell"].weight_ih
    units = find_units(model, model.parameters(), "quasi-diagonal", "recurrent")
    summed = {part.weight.shape: units.summed(part) for part in units.parts[model["cell"]].values()}
    assert summed == {(HIDDEN, IN): False, (HIDDEN, HIDDEN): True}
    assert not units.summed(model["dense"])


def test_computed_weights_follow_the_diagonal_rule() -> None:
    """A parametrized weight is no parameter: its layer is not looked into."""
    model = Sequence(nn.GRU(IN, HIDDEN))
    nn.utils.parametrizations.weight_norm(model.layer, "weight_hh_l0")
    x, t, loss = torch.randn(N, T, IN), torch.randint(3, (N,)), qd.Categorical()
    with pytest.warns(UserWarning, match=r"layer.weight_ih_l0 \(ParametrizedGRU\)"):
        optimizer = qd.QDOP(model, loss, lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    loss(model(x), t).backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str, bidirectional: bool) -> None:
    lengths = torch.tensor([2, 4, 3])

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = KINDS[kind](IN, HIDDEN, num_layers=2, bidirectional=bidirectional)
            ways = 2 if bidirectional else 1
            self.head = nn.Linear((T + 2) * ways * HIDDEN, 3)

        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, last = self.layer(packed)
            last = last[0] if isinstance(last, tuple) else last
            out, _ = pad_packed_sequence(out, batch_first=True)
            return self.head(torch.cat([out.flatten(1), last.transpose(0, 1).flatten(1)], 1))

    model, x, t = Packed(), torch.randn(N, T, IN), torch.randint(3, (N,))
    loss = qd.Categorical()
    order = lengths.argsort(descending=True, stable=True)
    for metric in ("outer-product", "exact"):
        optimizer, _ = step(model, x, t, loss, metric, sharing="exact")
        y = model(x)
        assert_sample_moments(optimizer, model.layer, y, vectors(metric, loss, y, t, []))
        model.zero_grad()
    assert order.tolist() == [1, 2, 0]  # the packing did reorder the samples


def test_batch_second_without_a_criterion_is_told_before_anything_moves() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(IN, HIDDEN), nn.Linear(HIDDEN, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x)[0])

    model = TimeFirst()
    before = [p.clone() for p in model.parameters()]
    with qd.QDOP(model, lr=0.1), pytest.raises(ValueError, match="batch second"):
        model(torch.randn(5, N, IN))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with qd.QDOP(model, qd.Gaussian(), lr=0.1) as optimizer:  # the criterion knows what it averages
        qd.Gaussian()(model(torch.randn(5, N, IN)), torch.randn(5, N, 1))
        optimizer.criterion(model(torch.randn(5, N, IN)), torch.randn(5, N, 1)).backward()
        optimizer.step()


def test_unbatched_sequence_is_one_sample() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(IN, HIDDEN), nn.Linear(T * HIDDEN, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x[0])[0].flatten().unsqueeze(0))

    model, x, t, loss = One(), torch.randn(1, T, IN), torch.randint(3, (1,)), qd.Categorical()
    optimizer, _ = step(model, x, t, loss, "outer-product", sharing="exact")
    y = model(x)
    vs = vectors("outer-product", loss, y, t, [])
    for _, weight, bias in pairs(model.layer):
        found = sample_gradients(y, vs, [weight, bias])  # type: ignore[list-item]
        assert_close(optimizer.moments(weight), moments(found, 1, unit_of(model.layer, weight)))


def test_dropout_that_cannot_be_repeated_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from quasidiag.layers import recurrent

    # As cuDNN does: masks from a generator that nobody else can read.
    other = lambda x, p: torch.nn.functional.dropout(x + 0, p)  # noqa: E731
    drawn_elsewhere = lambda x, p: (torch.rand(11), other(x, p))[1]  # noqa: E731
    monkeypatch.setattr(recurrent, "_dropout_time_first", drawn_elsewhere)
    model = Sequence(nn.LSTM(IN, HIDDEN, num_layers=2, dropout=0.5))
    loss = qd.Categorical()
    with (
        qd.QDOP(model, loss, lr=0.1),
        pytest.raises(RuntimeError, match="dropout inside LSTM could not be repeated"),
    ):
        loss(model(torch.randn(N, T, IN)), torch.randint(3, (N,))).backward()


def test_learns_a_sequence() -> None:
    """The parity of the last two bits, which needs the state."""
    model = Sequence(nn.LSTM(1, 8, batch_first=True), "outputs")
    model.head = nn.Linear(T * 8, 2)
    optimizer = qd.QDOP(model, lr=0.02, gamma=0.1)
    x = torch.randint(2, (64, T, 1)).double()
    t = (x[:, -1, 0] + x[:, -2, 0]).long() % 2
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(model(x), t))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]

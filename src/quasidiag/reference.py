"""Slow, readable, brute-force versions of everything fast.

Each function here follows its definition with as little cleverness as possible, so that the tests
(and a doubting reader) can hold the fast code against it. Nothing here is meant for training.

A unit's *block* is written bias first: index 0 is the bias, index i ≥ 1 the i-th incoming weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

Vector = list[float]
Matrix = list[list[float]]
UnitMetric = tuple[Vector, Vector]  # diagonal, bias row


# ------------------------------------------------ Algorithm 1: the quasi-diagonal reduction


def qd_rank_one_update(
    diagonal: Vector, row: Vector, v: Vector, alpha: float
) -> tuple[Vector, Vector]:
    """QDRankOneUpdate, M ← M + α v vᵀ, keeping only M_ii and M_0i."""
    new_diagonal = [diagonal[i] + alpha * v[i] ** 2 for i in range(len(v))]
    new_row = [row[i - 1] + alpha * v[0] * v[i] for i in range(1, len(v))]
    return new_diagonal, new_row


def qd_solve(
    diagonal: Vector, row: Vector, v: Vector, eps: float = 1e-8, floor: float | None = None
) -> Vector:
    """QDSolve, w = M⁻¹ v: with Δ = diagonal + ε and r = row,

        w_i = (Δ0 v_i − r_i v_0) / max(Δi Δ0 − r_i², floor),    w_0 = (v_0 − Σ r_i w_i) / Δ0.

    `floor=None` is the paper's floor, ε. A quotient 0/0 is an input that
    never varies: it gets no step.
    """
    floor = eps if floor is None else floor
    d = [value + eps for value in diagonal]
    w = [0.0] * len(v)
    for i in range(1, len(v)):
        denominator = max(d[i] * d[0] - row[i - 1] ** 2, floor)
        w[i] = (d[0] * v[i] - row[i - 1] * v[0]) / denominator if denominator > 0 else 0.0
    rest = v[0] - sum(row[i - 1] * w[i] for i in range(1, len(v)))
    w[0] = rest / d[0] if d[0] > 0 else 0.0
    return w


def diagonal_solve(
    diagonal: Vector, v: Vector, eps: float = 1e-8, floor: float | None = None
) -> Vector:
    """w_i = v_i / max(M_ii + ε, floor); 0/0 is no step."""
    denominators = [max(value + eps, eps if floor is None else floor) for value in diagonal]
    return [vi / d if d > 0 else 0.0 for vi, d in zip(v, denominators, strict=True)]


def completion(diagonal: Tensor, row: Tensor) -> Tensor:
    """The dense matrix whose inverse the quasi-diagonal solve applies.

    M_ii is the diagonal, M_0i = r_i, and M_ij = r_i r_j / M_00 for i ≠ j.
    """
    edge = torch.cat([diagonal[:1], row])
    dense = torch.outer(edge, edge) / diagonal[0]
    return dense - torch.diag(dense.diagonal()) + torch.diag(diagonal)


# ------------------------------------------------ Moments from per-sample gradients


class UnitMoments(NamedTuple):
    """m00 = ‹δ²›, m0i = ‹δ² a_i›, mii = ‹δ² a_i²›, for the units of one layer."""

    m00: Tensor
    m0i: Tensor
    mii: Tensor


def per_sample_gradients(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """d loss(model(x_n), t_n) / dθ by one backward pass for each sample: parameter's name → [N, *shape]."""
    return _stack(model, [loss(model(x[n : n + 1]), target[n : n + 1]) for n in range(len(x))])


def vector_gradients(model: nn.Module, x: Tensor, vectors: Tensor) -> dict[str, Tensor]:
    """J_nᵀ u_n for every sample, the gradient of ⟨u_n, model(x_n)⟩; `vectors` has the shape of the outputs."""
    scalars = [(model(x[n : n + 1]) * vectors[n : n + 1]).sum() for n in range(len(x))]
    return _stack(model, scalars)


def _stack(model: nn.Module, scalars: Sequence[Tensor]) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows = [torch.autograd.grad(s, parameters, materialize_grads=True) for s in scalars]
    return {name: torch.stack([row[j] for row in rows]) for j, name in enumerate(names)}


def unit_blocks(gradients: dict[str, Tensor], layer: str) -> Tensor:
    """Per-sample gradients of a Linear layer as blocks, [N, out, 1 + in], bias first."""
    weight, bias = gradients[f"{layer}.weight"], gradients[f"{layer}.bias"]
    return torch.cat([bias.unsqueeze(-1), weight], dim=-1)


def unit_matrices(blocks: Tensor) -> Tensor:
    """‹g gᵀ› for each unit, the full block of its metric: [out, 1 + in, 1 + in]."""
    return (
        torch.stack([torch.outer(g, g) for sample in blocks for g in sample])
        .unflatten(0, blocks.shape[:2])
        .mean(0)
    )


def unit_moments(matrices: Tensor) -> UnitMoments:
    """The entries of the full blocks that the quasi-diagonal metric keeps."""
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    return UnitMoments(diagonal[:, 0], matrices[:, 0, 1:], diagonal[:, 1:])


# ------------------------------------------------ The dense Fisher matrix, from its definition


def _flat_outer(gradients: dict[str, Tensor], weight: Tensor) -> Tensor:
    """Σ_n weight_n g_n g_nᵀ / N with g_n all parameters of the model in one vector."""
    flat = torch.cat([g.flatten(1) for g in gradients.values()], dim=1)
    return torch.einsum("n,ni,nj->ij", weight, flat, flat) / len(flat)


def fisher_categorical(model: nn.Module, x: Tensor) -> Tensor:
    """F = ‹Σ_k p_k ∇ln p_k ∇ln p_kᵀ›: every class in turn, weighted by its probability. [P, P]"""
    p = model(x).detach().softmax(-1)
    total = torch.zeros((), dtype=x.dtype)
    for k in range(p.shape[-1]):
        target = torch.full((len(x),), k)
        scores = per_sample_gradients(model, nn.functional.cross_entropy, x, target)
        total = total + _flat_outer(scores, p[:, k])
    return total


def fisher_gaussian(model: nn.Module, x: Tensor, std: float | Tensor = 1.0) -> Tensor:
    """F = ‹Jᵀ diag(1/σ²) J›. [P, P]"""
    y = model(x).detach()
    precision = 1 / torch.as_tensor(std, dtype=x.dtype).expand(y.shape) ** 2
    return _sum_over_outputs(model, x, precision)


def fisher_bernoulli(model: nn.Module, x: Tensor) -> Tensor:
    """F = ‹Σ_k Σ_{y=0,1} p(y) s_k(y) s_k(y)ᵀ› with s_k = (p − y) ∇logit_k. [P, P]

    Outputs are independent given x and scores have mean zero, so products across outputs vanish.
    """
    p = model(x).detach().sigmoid()
    weight = torch.zeros_like(p)
    for value, probability in ((0.0, 1 - p), (1.0, p)):
        weight += probability * (p - value) ** 2
    return _sum_over_outputs(model, x, weight)


def _sum_over_outputs(model: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for k in range(weight.shape[-1]):
        only_k = torch.zeros_like(weight)
        only_k[..., k] = 1
        total = total + _flat_outer(vector_gradients(model, x, only_k), weight[:, k])
    return total


def fisher_unit_matrices(fisher: Tensor, model: nn.Module, layer: str) -> Tensor:
    """A Linear layer's unit blocks inside the dense Fisher matrix: [out, 1 + in, 1 + in]."""
    places, start = {}, 0
    for name, parameter in model.named_parameters():
        places[name] = torch.arange(start, start + parameter.numel()).view(parameter.shape)
        start += parameter.numel()
    weight, bias = places[f"{layer}.weight"], places[f"{layer}.bias"]
    index = torch.cat([bias.unsqueeze(-1), weight], dim=-1)
    return torch.stack([fisher[unit][:, unit] for unit in index])


# ------------------------------------------------ A network and its training in plain numbers

ACTIVATIONS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    # name: (f, f′ as a function of the activity f(z))
    "sigmoid": (lambda z: 1 / (1 + math.exp(-z)), lambda a: a * (1 - a)),
    "tanh": (math.tanh, lambda a: 1 - a * a),
    "relu": (lambda z: max(z, 0.0), lambda a: 1.0 if a > 0 else 0.0),
}

ALGORITHMS: dict[str, tuple[str, str]] = {
    "SGD": ("none", "none"),
    "AdaGrad": ("squared gradient", "square root"),
    "DOP": ("outer-product", "diagonal"),
    "QDOP": ("outer-product", "quasi-diagonal"),
    "DMCNat": ("monte-carlo", "diagonal"),
    "QDMCNat": ("monte-carlo", "quasi-diagonal"),
    "DNat": ("exact", "diagonal"),
    "QDNat": ("exact", "quasi-diagonal"),
}


@dataclass
class Chain:
    """A multilayer perceptron in plain numbers, with a linear output layer.

    `blocks[l][k]` is unit k of layer l, bias first.
    """

    blocks: list[Matrix]
    activation: str = "sigmoid"
    output: str = "categorical"
    std: float = 1.0
    metric: list[list[UnitMetric]] | None = None  # moving averages, [layer][unit] = (diagonal, row)
    momentum: list[Matrix] | None = None

    @classmethod
    def of(cls, layers: Sequence[nn.Linear], **options: object) -> Chain:
        """A chain with the numbers of these Linear layers; `options` are the other fields."""
        blocks = [
            torch.cat([layer.bias.unsqueeze(-1), layer.weight], dim=-1).tolist() for layer in layers
        ]
        return cls(blocks, **options)  # type: ignore[arg-type]

    def forward(self, x: Vector) -> tuple[Matrix, Vector]:
        """The input of every layer, and the output, for one sample."""
        f = ACTIVATIONS[self.activation][0]
        inputs, a = [], x
        for depth, layer in enumerate(self.blocks):
            inputs.append(a)
            z = [u[0] + sum(w * ai for w, ai in zip(u[1:], a, strict=True)) for u in layer]
            a = z if depth == len(self.blocks) - 1 else [f(value) for value in z]
        return inputs, a

    def backward(self, inputs: Matrix, vector: Vector, power: int = 1) -> Matrix:
        """Backpropagate `vector` from the output to every layer's pre-activations, for one sample.

        `power=2` squares weights and derivatives: that is the backpropagated metric of Ollivier
        (2015), m_i ← (Σ_k m_k w_ki²) f′(a_i)².
        """
        slope = ACTIVATIONS[self.activation][1]
        deltas = [vector]
        for depth in range(len(self.blocks) - 1, 0, -1):
            layer, a = self.blocks[depth], inputs[depth]
            back = [
                sum(deltas[0][k] * layer[k][i + 1] ** power for k in range(len(layer)))
                * slope(a[i]) ** power
                for i in range(len(a))
            ]
            deltas.insert(0, back)
        return deltas

    def residual(self, y: Vector, target: Sequence[float]) -> Vector:
        """d(−ln p(target | y)) / dy; a categorical target is the one number of its class."""
        if self.output == "categorical":
            return [p - (k == int(target[0])) for k, p in enumerate(_softmax(y))]
        if self.output == "gaussian":
            return [(y[k] - target[k]) / self.std**2 for k in range(len(y))]
        return [ACTIVATIONS["sigmoid"][0](y[k]) - target[k] for k in range(len(y))]

    def vectors(self, y: Vector) -> Matrix:
        """Vectors whose outer products sum to the Fisher matrix of the output."""
        places = range(len(y))
        if self.output == "categorical":
            p = _softmax(y)
            return [[math.sqrt(p[k]) * (p[j] - (j == k)) for j in places] for k in places]
        return [[math.sqrt(self.output_metric(y)[k]) * (j == k) for j in places] for k in places]

    def output_metric(self, y: Vector) -> Vector:
        """The diagonal of the output's Fisher matrix, where the backpropagated metric starts."""
        if self.output == "gaussian":
            return [1 / self.std**2 for _ in y]
        p = _softmax(y) if self.output == "categorical" else list(map(ACTIVATIONS["sigmoid"][0], y))
        return [value * (1 - value) for value in p]

    def batch_metric(
        self, metric: str, xs: Matrix, targets: Matrix, draws: Sequence[Matrix] = ()
    ) -> list[list[UnitMetric]]:
        """The minibatch's moments, [layer][unit] = (diagonal, row), by one rank-one update for each vector."""
        total = [[([0.0] * len(u), [0.0] * (len(u) - 1)) for u in layer] for layer in self.blocks]
        for n, x in enumerate(xs):
            inputs, y = self.forward(x)
            if metric == "outer-product":
                deltas = [self.backward(inputs, self.residual(y, targets[n]))]
                scale = 1.0
            elif metric == "monte-carlo":
                deltas = [self.backward(inputs, self.residual(y, draw[n])) for draw in draws]
                scale = 1 / len(draws)
            elif metric == "exact":
                deltas = [self.backward(inputs, vector) for vector in self.vectors(y)]
                scale = 1.0
            else:
                squares = self.backward(inputs, self.output_metric(y), power=2)
                deltas = [[[math.sqrt(m) for m in layer] for layer in squares]]
                scale = 1.0
            for delta in deltas:
                for depth, layer in enumerate(total):
                    for k, unit in enumerate(layer):
                        g = [delta[depth][k] * a for a in (1.0, *inputs[depth])]
                        layer[k] = qd_rank_one_update(*unit, g, scale / len(xs))
        return total

    def gradient(self, xs: Matrix, targets: Matrix) -> list[Matrix]:
        """The gradient of the mean loss, in blocks."""
        total = [[[0.0] * len(u) for u in layer] for layer in self.blocks]
        for n, x in enumerate(xs):
            inputs, y = self.forward(x)
            deltas = self.backward(inputs, self.residual(y, targets[n]))
            for depth, layer in enumerate(total):
                for k, unit in enumerate(layer):
                    for i, a in enumerate((1.0, *inputs[depth])):
                        unit[i] += deltas[depth][k] * a / len(xs)
        return total

    def train_step(
        self,
        algorithm: str,
        xs: Matrix,
        targets: Matrix,
        *,
        lr: float,
        gamma: float = 0.01,
        eps: float = 1e-8,
        floor: float | None = None,
        momentum: float = 0.0,
        draws: Sequence[Matrix] = (),
    ) -> None:
        """One step of one of the paper's eight algorithms: metric, moving average, solve, update.

        `draws` are the targets drawn for the Monte Carlo metric, one list of targets for each draw.
        """
        metric, reduction = ALGORITHMS[algorithm]
        v = self.gradient(xs, targets)
        if metric == "squared gradient":
            batch = [[([g * g for g in u], [0.0] * (len(u) - 1)) for u in layer] for layer in v]
        elif metric != "none":
            batch = self.batch_metric(metric, xs, targets, draws)
        else:
            batch = []
        rate = 1.0 if self.metric is None else gamma  # the first minibatch sets the metric
        old = batch if self.metric is None else self.metric
        self.metric = [
            [
                (_average(uo[0], un[0], rate), _average(uo[1], un[1], rate))
                for uo, un in zip(lo, ln, strict=True)
            ]
            for lo, ln in zip(old, batch, strict=True)
        ]
        if self.momentum is None:
            self.momentum = [[[0.0] * len(u) for u in layer] for layer in self.blocks]
        for depth, layer in enumerate(self.blocks):
            for k, unit in enumerate(layer):
                g = v[depth][k]
                if reduction == "none":
                    w = g
                else:
                    diagonal, row = self.metric[depth][k]
                    if reduction == "square root":
                        w = [g[i] / (math.sqrt(diagonal[i]) + eps) for i in range(len(g))]
                    elif reduction == "diagonal":
                        w = diagonal_solve(diagonal, g, eps, floor)
                    else:
                        w = qd_solve(diagonal, row, g, eps, floor)
                speed = self.momentum[depth][k]
                for i in range(len(unit)):
                    speed[i] = momentum * speed[i] + w[i]
                    unit[i] -= lr * speed[i]


def _softmax(y: Vector) -> Vector:
    top = max(y)
    exponentials = [math.exp(value - top) for value in y]
    return [e / sum(exponentials) for e in exponentials]


def _average(old: Vector, new: Vector, rate: float) -> Vector:
    return [(1 - rate) * o + rate * n for o, n in zip(old, new, strict=True)]

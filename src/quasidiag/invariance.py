"""Twin networks: one function in two representations, trained side by side, and how far they drift.

A change of representation replaces every activity by an affine image of it, inputs included, and
every pre-activation by a multiple:

    a′_k = scale_k a_k + offset_k,        z′_k = gain_k z_k.

The twin is the network that computes the same function from the changed activities. An optimizer that
is invariant to the change keeps the two functions equal for as long as they are trained; the others let
them drift apart, and then what is learnt depends on how the data happened to be encoded.

    change = random_affine(model, seed=0)
    make = lambda net, loss: qd.QDOP(net, loss, lr=1e-2, eps=0.0, floor=0.0)  # exact without both
    drift = measure(make, model, criterion, change, x, t)
    drift.final, drift.moved
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Factory = Callable[[nn.Module, nn.Module], Optimizer]


class UnitChange(NamedTuple):
    """The change of one layer of activities. `activation` computes the changed activity, if torch has a module for it."""

    scale: Tensor
    offset: Tensor
    gain: Tensor
    activation: nn.Module | None = None


@dataclass(frozen=True)
class Change:
    """A change of representation: one `UnitChange` for the inputs, then one for each hidden layer."""

    name: str
    layers: tuple[UnitChange, ...]

    def inputs(self, x: Tensor) -> Tensor:
        """The inputs as the twin sees them."""
        return self.layers[0].scale * x + self.layers[0].offset


class Reencoded(nn.Module):
    """An activation f in changed units: scale · f(z / gain) + offset."""

    scale: Tensor
    offset: Tensor
    gain: Tensor

    def __init__(self, activation: nn.Module, change: UnitChange) -> None:
        super().__init__()
        self.activation = activation
        self.register_buffer("scale", change.scale)
        self.register_buffer("offset", change.offset)
        self.register_buffer("gain", change.gain)

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * self.activation(z / self.gain) + self.offset


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The Linear layers of a plain multilayer perceptron; raises for any other model, which has no twin here."""
    modules = list(model) if isinstance(model, nn.Sequential) else [model]
    layers = [m for m in modules if isinstance(m, nn.Linear)]
    expected = [i % 2 == 0 for i in range(len(modules))]
    if not layers or [isinstance(m, nn.Linear) for m in modules] != expected:
        raise ValueError(
            "a twin needs an nn.Sequential that alternates Linear layers and activations: "
            f"got {[type(m).__name__ for m in modules]}"
        )
    if any(layer.bias is None for layer in layers):
        raise ValueError("a twin needs a bias in every Linear layer: it takes up the offsets")
    return layers


@torch.no_grad()
def twin(model: nn.Sequential, change: Change) -> nn.Sequential:
    """The network that computes model(x) from change.inputs(x).

    A unit with weights w, bias b that reads a′ = s a + o has w′ = w/s and b′ = b − Σ w o/s; then its
    whole block is multiplied by the gain of its own pre-activation.
    """
    layers = linear_layers(model)
    if len(change.layers) != len(layers):
        raise ValueError(
            f"the change {change.name!r} has {len(change.layers)} layers of activities, "
            f"the model {len(layers)}"
        )
    modules: list[nn.Module] = []
    for depth, layer in enumerate(layers):
        new, seen = copy.deepcopy(layer), change.layers[depth]
        new.weight.copy_(layer.weight / seen.scale)
        new.bias.copy_(layer.bias - new.weight @ seen.offset)
        modules.append(new)
        if depth + 1 < len(layers):
            own = change.layers[depth + 1]
            new.weight.mul_(own.gain.unsqueeze(-1))
            new.bias.mul_(own.gain)
            modules.append(own.activation or Reencoded(copy.deepcopy(model[2 * depth + 1]), own))
    return nn.Sequential(*modules)


# ------------------------------------------------ Changes of representation


def identity_change(layer: nn.Linear) -> UnitChange:
    """The change that leaves the inputs of `layer` as they are."""
    one = torch.ones(layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    return UnitChange(one, torch.zeros_like(one), one.clone())


def inversion(model: nn.Module) -> Change:
    """x → 1 − x: black on white instead of white on black (Fig. 1 of the paper)."""
    first, *rest = (identity_change(layer) for layer in linear_layers(model))
    inputs = first._replace(scale=-first.scale, offset=torch.ones_like(first.offset))
    return Change("inversion", (inputs, *rest))


def sigmoid_to_tanh(model: nn.Module) -> Change:
    """Tanh in place of sigmoid in every hidden unit: tanh(z/2) = 2 sigmoid(z) − 1."""
    first, *rest = (identity_change(layer) for layer in linear_layers(model))
    assert isinstance(model, nn.Sequential) or not rest
    if not all(isinstance(model[2 * i + 1], nn.Sigmoid) for i in range(len(rest))):  # type: ignore[index]
        raise ValueError("sigmoid_to_tanh needs a network of sigmoid units")
    hidden = [UnitChange(2 * u.scale, u.offset - 1, u.gain / 2, nn.Tanh()) for u in rest]
    return Change("sigmoid to tanh", (first, *hidden))


def random_affine(model: nn.Module, seed: int = 0, spread: float = 1.0) -> Change:
    """Every activity, inputs included, becomes a random multiple of itself (of either sign) plus a random offset."""
    return _random("affine", model, seed, spread, offsets=True)


def random_rescaling(model: nn.Module, seed: int = 0, spread: float = 1.0) -> Change:
    """Every activity, inputs included, becomes a random multiple of itself (of either sign)."""
    return _random("rescaling", model, seed, spread, offsets=False)


def _random(name: str, model: nn.Module, seed: int, spread: float, offsets: bool) -> Change:
    generator = torch.Generator().manual_seed(seed)
    changes = []
    for layer in linear_layers(model):
        n = layer.in_features
        numbers = torch.randn(4, n, generator=generator, dtype=torch.float64).to(layer.weight)
        scale = (0.5 * spread * numbers[0]).exp() * numbers[1].sign()
        gain = (0.5 * spread * numbers[2]).exp()
        changes.append(UnitChange(scale, spread * offsets * numbers[3], gain))
    return Change(name, tuple(changes))


CHANGES: dict[str, Callable[[nn.Module], Change]] = {
    "inversion": inversion,
    "sigmoid to tanh": sigmoid_to_tanh,
    "rescaling": random_rescaling,
    "affine": random_affine,
}


# ------------------------------------------------ Training the twins


@dataclass
class Drift:
    """How far the twins drifted apart, after each step.

    `differences` is the largest difference between the twins' outputs on the probe inputs, `moves` the
    largest change of the first one's outputs since the start (a network that does not move cannot drift),
    `losses` the first one's training loss.
    """

    differences: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        """The difference after the last step."""
        return self.differences[-1]

    @property
    def worst(self) -> float:
        """The largest difference at any step."""
        return max(self.differences)

    @property
    def moved(self) -> float:
        """How far the first network's outputs are from the start, after the last step."""
        return self.moves[-1]


def measure(
    factory: Factory,
    model: nn.Sequential,
    criterion: nn.Module,
    change: Change,
    x: Tensor,
    target: Tensor,
    *,
    steps: int = 100,
    batch_size: int = 100,
    probe: Tensor | None = None,
) -> Drift:
    """Train the model and its twin on the same minibatches (in order, over and over) and compare them.

    `factory(model, criterion)` makes the optimizer, the same for both; one that draws random numbers
    should be given a seed there. Neither `model` nor `criterion` is touched. `probe` are the inputs on which the
    outputs are compared, by default the first minibatch.
    """
    if steps < 1 or not 1 <= batch_size <= len(x):
        raise ValueError(f"steps={steps} and batch_size={batch_size} do not fit {len(x)} samples")
    probe = x[:batch_size] if probe is None else probe
    nets = [copy.deepcopy(model), twin(model, change)]
    losses = [copy.deepcopy(criterion) for _ in nets]
    views: list[Callable[[Tensor], Tensor]] = [lambda z: z, change.inputs]
    optimizers = [factory(net, loss) for net, loss in zip(nets, losses, strict=True)]
    drift = Drift()
    begin = _outputs(nets[0], probe)
    for step in range(steps):
        start = step * batch_size % (len(x) - batch_size + 1)
        rows = slice(start, start + batch_size)
        for number, (net, loss, view, optimizer) in enumerate(
            zip(nets, losses, views, optimizers, strict=True)
        ):
            optimizer.zero_grad()
            value = loss(net(view(x[rows])), target[rows])
            value.backward()
            optimizer.step()
            if number == 0:
                drift.losses.append(value.item())
        one, other = (_outputs(net, view(probe)) for net, view in zip(nets, views, strict=True))
        drift.differences.append((one - other).abs().max().item())
        drift.moves.append((one - begin).abs().max().item())
    return drift


@torch.no_grad()
def _outputs(net: nn.Module, x: Tensor) -> Tensor:
    training = net.training
    try:
        return net.eval()(x)
    finally:
        net.train(training)

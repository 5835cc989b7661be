"""Every simple layer × metric × reduction, against the gradient of every occurrence, float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import (
    METRICS,
    Net,
    assert_close,
    moments,
    occurrence_gradients,
    sample_gradients,
    step,
    unit_of,
    vectors,
)
from torch import Tensor, nn

import quasidiag as qd
from quasidiag.moments import Moments

N = 3


def tokens() -> Tensor:
    return torch.tensor([[0, 2, 2, 4], [1, 1, 1, 0], [4, 3, 2, 0]])


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, *shape) + 0.3


#: layer, its input, numbers per sample in its output, the channel dimension of its output
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int, int]] = {
    "Linear": (lambda: nn.Linear(4, 5), numbers(4), 5, -1),
    "Linear on a sequence": (lambda: nn.Linear(4, 5), numbers(2, 3, 4), 30, -1),
    "Linear without bias": (lambda: nn.Linear(4, 5, bias=False), numbers(2, 4), 10, -1),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 2), numbers(2, 5), 12, 1),
    "Conv1d strided, padded": (lambda: nn.Conv1d(2, 3, 3, 2, 1), numbers(2, 5), 9, 1),
    "Conv1d same": (lambda: nn.Conv1d(2, 3, 4, padding="same"), numbers(2, 5), 15, 1),
    "Conv1d without bias": (lambda: nn.Conv1d(2, 3, 2, bias=False), numbers(2, 5), 12, 1),
    "Conv2d": (lambda: nn.Conv2d(2, 3, (2, 3)), numbers(2, 3, 4), 12, 1),
    "Conv2d dilated": (lambda: nn.Conv2d(2, 3, 2, 1, 1, dilation=2), numbers(2, 3, 4), 36, 1),
    "Conv2d in groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), numbers(4, 3, 3), 24, 1),
    "Conv2d depthwise": (lambda: nn.Conv2d(4, 4, 2, groups=4), numbers(4, 3, 3), 16, 1),
    "Conv2d reflect": (
        lambda: nn.Conv2d(2, 3, 3, 2, 1, padding_mode="reflect"),
        numbers(2, 4, 3),
        12,
        1,
    ),
    "Conv1d circular": (
        lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"),
        numbers(2, 4),
        12,
        1,
    ),
    "Conv1d replicate": (
        lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"),
        numbers(2, 3),
        15,
        1,
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=(0, 1, 0)), numbers(2, 2, 2, 3), 18, 1),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 3, 2, 1), numbers(2, 3), 15, 1),
    "ConvTranspose1d output padding": (
        lambda: nn.ConvTranspose1d(2, 3, 3, 2, 1, output_padding=1, dilation=2),
        numbers(2, 3),
        24,
        1,
    ),
    "ConvTranspose2d in groups": (
        lambda: nn.ConvTranspose2d(4, 6, (2, 3), (2, 1), groups=2),
        numbers(4, 2, 2),
        96,
        1,
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 2, 2), numbers(2, 1, 2, 1), 24, 1),
    "Embedding": (lambda: nn.Embedding(5, 3), tokens, 12, -1),
    "Embedding with padding": (lambda: nn.Embedding(5, 3, padding_idx=2), tokens, 12, -1),
    "LayerNorm": (lambda: nn.LayerNorm(4), numbers(3, 4), 12, -1),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), numbers(4, 2, 3), 24, 1),
    "GroupNorm flat": (lambda: nn.GroupNorm(2, 4), numbers(4), 4, 1),
    "InstanceNorm2d": (
        lambda: nn.InstanceNorm2d(3, affine=True),
        numbers(3, 2, 2),
        12,
        1,
    ),
    "RMSNorm": (lambda: nn.RMSNorm(4), numbers(3, 4), 12, -1),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), numbers(4), 4, 1),
    "BatchNorm1d on a sequence": (lambda: nn.BatchNorm1d(4), numbers(4, 3), 12, 1),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), numbers(3, 2, 2), 12, 1),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), numbers(2, 1, 2, 2), 8, 1),
}


def make(case: str) -> tuple[Net, Tensor, Tensor]:
    layer, x, outputs, _ = CASES[case]
    model = Net(layer(), outputs)
    with torch.no_grad():  # norms start at 1 and 0, where some mistakes cannot be seen
        for p in model.layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model, x(), torch.randint(3, (N,))


def expand_oracle(
    model: Net, x: Tensor, t: Tensor, metric: str, drawn: list[Tensor], case: str
) -> Moments:
    z = model.layer(x)
    y = model.head(z.tanh().flatten(1))
    parameters = list(model.layer.parameters())
    found = []
    for u in vectors(metric, qd.Categorical(), y, t, drawn):
        (delta,) = torch.autograd.grad(y, z, u, retain_graph=True)
        found += occurrence_gradients(z, delta, CASES[case][3], parameters)
    units = unit_of(model.layer, parameters[0])
    return moments(found, N, units, bias=len(parameters) > 1)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("case", CASES)
def test_every_position_is_one_more_occurrence(case: str, metric: str, reduction: str) -> None:
    model, x, t = make(case)
    optimizer, drawn = step(model, x, t, qd.Categorical(), metric, reduction=reduction, samples=2)
    expected = expand_oracle(model, x, t, metric, drawn, case)
    assert_close(optimizer.moments(model.layer), expected, reduction)


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "unitwise"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("case", CASES)
def test_exact_sharing_is_the_square_of_the_sample_s_gradient(
    case: str, metric: str, reduction: str
) -> None:
    model, x, t = make(case)
    loss = qd.Categorical()
    options = {"reduction": reduction, "samples": 2, "sharing": "exact"}
    optimizer, drawn = step(model, x, t, loss, metric, **options)
    y, parameters = model(x), list(model.layer.parameters())
    found = sample_gradients(y, vectors(metric, loss, y, t, drawn), parameters)
    units = unit_of(model.layer, parameters[0])
    expected = moments(found, N, units, bias=len(parameters) > 1)
    assert_close(optimizer.moments(model.layer), expected, reduction)


@pytest.mark.parametrize("case", CASES)
def test_unitwise_moments(case: str) -> None:
    model, x, t = make(case)
    optimizer, _ = step(model, x, t, qd.Categorical(), "outer-product", reduction="unitwise")
    expected = expand_oracle(model, x, t, "outer-product", [], case)
    assert_close(optimizer.moments(model.layer), expected)


@pytest.mark.parametrize("case", ["Linear", "Conv2d in groups", "ConvTranspose2d in groups"])
@pytest.mark.parametrize("sharing", ["expand", "exact", "reduce"])
def test_one_position_is_the_same_however_it_is_shared(case: str, sharing: str) -> None:
    """Kernels as large as the input leave one position (the transposed one has one input position)."""
    torch.manual_seed(1)
    layers = {
        "Linear": lambda: (nn.Linear(4, 5), torch.randn(N, 4), 5),
        "Conv2d in groups": lambda: (nn.Conv2d(4, 6, 3, groups=2), torch.randn(N, 4, 3, 3), 6),
        "ConvTranspose2d in groups": lambda: (
            nn.ConvTranspose2d(4, 6, 1, groups=2),
            torch.randn(N, 4, 1, 1),
            6,
        ),
    }
    layer, x, outputs = layers[case]()
    model, t = Net(layer, outputs), torch.randint(3, (N,))
    expand, _ = step(model, x, t, qd.Categorical(), "outer-product")
    model.zero_grad()
    other, _ = step(model, x, t, qd.Categorical(), "outer-product", sharing=sharing)
    assert_close(other.moments(layer), expand.moments(layer))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("leading", [(), (2,)])
def test_bilinear(metric: str, leading: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    layer = nn.Bilinear(3, 2, 4)
    model = Net(layer, 4 * (leading[0] if leading else 1))
    x1, x2, t = torch.randn(N, *leading, 3), torch.randn(N, *leading, 2), torch.randint(3, (N,))
    loss = qd.Categorical()
    optimizer, drawn = step(model, (x1, x2), t, loss, metric, sharing="exact", samples=2)
    y = model(x1, x2)
    found = sample_gradients(y, vectors(metric, loss, y, t, drawn), [layer.weight, layer.bias])
    expected = moments(found, N, unit_of(layer, layer.weight))
    assert_close(optimizer.moments(layer), expected)
    if not leading:
        for reduction in ("quasi-diagonal", "unitwise"):
            model.zero_grad()
            if metric != "monte-carlo":
                again, _ = step(model, (x1, x2), t, loss, metric, reduction=reduction)
                assert_close(again.moments(layer), expected)


def test_layer_norm_over_several_dimensions() -> None:
    layer = nn.LayerNorm((2, 3))
    model, x, t = Net(layer, 12), torch.randn(N, 2, 2, 3), torch.randint(3, (N,))
    loss = qd.Categorical()
    optimizer, _ = step(model, x, t, loss, "exact", sharing="exact")
    y = model(x)
    vs = vectors("exact", loss, y, t, [])
    found = sample_gradients(y, vs, [layer.weight, layer.bias])
    assert_close(optimizer.moments(layer), moments(found, N, unit_of(layer, layer.weight)))


def test_batch_norm_with_running_statistics() -> None:
    """In evaluation mode within a training model, samples are not coupled at all."""
    layer = nn.BatchNorm1d(4)
    model, x, t = Net(layer, 4), torch.randn(N, 4) * 3, torch.randint(3, (N,))
    layer.eval()
    layer.running_mean += 0.5
    loss = qd.Categorical()
    optimizer, _ = step(model, x, t, loss, "exact")
    gradients = []
    for n in range(N):  # one sample alone
        y = model(x[n : n + 1])
        vs = vectors("exact", loss, y, t[n : n + 1], [])
        gradients += sample_gradients(y, vs, [layer.weight, layer.bias])
    assert_close(optimizer.moments(layer), moments(gradients, N, unit_of(layer, layer.weight)))


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(4, 2), torch.randn(4)),
        (nn.Conv1d(2, 3, 2), torch.randn(2, 5)),
        (nn.ConvTranspose2d(2, 3, 2), torch.randn(2, 5, 5)),
        (nn.LayerNorm(4), torch.randn(4)),
    ],
)
def test_no_batch_dimension_is_told(layer: nn.Module, x: Tensor) -> None:
    layer.double()
    before = [p.clone() for p in layer.parameters()]
    with (
        qd.QDOP(layer, lr=1.0),
        pytest.raises(ValueError, match="without a batch dimension"),
    ):
        layer(x.double())
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_arguments_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    model, x, t = Named(), torch.randn(N, 4), torch.randint(3, (N,))
    optimizer, _ = step(model, x, t, qd.Categorical(), "exact")
    assert optimizer.moments(model.layer).mii.abs().sum() > 0

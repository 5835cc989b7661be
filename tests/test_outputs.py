"""Output models: value, derivative, draws and Fisher matrix, each from its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions

import quasidiag as qd
from nets import OUTPUTS, STD, batch, criterion, mlp
from quasidiag import metrics
from quasidiag.auto.quadratic import QuadraticModel
from quasidiag.metrics import cotangents


def case(output: str, n: int = 6, k: int = 4) -> tuple[qd.OutputModel, Tensor, Tensor]:
    y = torch.randn(n, k, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return criterion(output), y, batch(output, n, 2, k)[1]


def distribution(output: str, y: Tensor) -> distributions.Distribution:
    if output == "categorical":
        return distributions.Categorical(logits=y)
    if output == "gaussian":
        return distributions.Normal(y, STD)
    return distributions.Bernoulli(logits=y)


def dense_fisher(output: str, y: Tensor) -> Tensor:
    """[N, K, K], in closed form."""
    if output == "categorical":
        p = y.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    if output == "gaussian":
        return torch.diag_embed(torch.full_like(y, STD**-2))
    return torch.diag_embed(y.sigmoid() * (1 - y.sigmoid()))


@pytest.mark.parametrize("output", OUTPUTS)
def test_value_is_the_mean_negative_log_likelihood(output: str) -> None:
    model, y, t = case(output)
    expected = -distribution(output, y).log_prob(t).flatten(1 if output != "categorical" else 0)
    expected = expected.sum() / len(y)
    torch.testing.assert_close(model(y, t), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("output", OUTPUTS)
def test_residual_is_the_derivative_of_one_sample_s_loss(output: str) -> None:
    model, y, t = case(output)
    y.requires_grad_()
    (gradient,) = torch.autograd.grad(model(y, t) * len(y), y)
    torch.testing.assert_close(model.residual(y.detach(), t), gradient, rtol=1e-12, atol=1e-12)
    assert model.terms(y, t) == len(y)


@pytest.mark.parametrize("output", OUTPUTS)
def test_vectors_diagonal_and_inner_product_belong_to_one_fisher_matrix(output: str) -> None:
    model, y, _ = case(output)
    fisher = dense_fisher(output, y)
    vectors = model.vectors(y)
    assert vectors.shape[1:] == y.shape
    torch.testing.assert_close(torch.einsum("kni,knj->nij", vectors, vectors), fisher)
    torch.testing.assert_close(torch.stack([*model.each_vector(y)]), vectors)
    torch.testing.assert_close(
        model.fisher(y).expand_as(y), fisher.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=1e-12
    )
    u, v = torch.randn(2, *y.shape, dtype=y.dtype)
    torch.testing.assert_close(
        model.inner(y, u, v), torch.einsum("ni,nij,nj->", u, fisher, v), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("output", OUTPUTS)
def test_draws_follow_the_model(output: str) -> None:
    """The residuals at drawn targets have mean zero and the Fisher matrix as covariance."""
    model, y, _ = case(output, n=1)
    n = 40_000
    many = y.expand(n, -1)
    residual = model.residual(many, model.sample(many, torch.Generator().manual_seed(0)))
    covariance = residual.T @ residual / n
    fisher = dense_fisher(output, y)[0]
    spread = 5 * fisher.max() / math.sqrt(n)
    torch.testing.assert_close(
        residual.mean(0), torch.zeros(4, dtype=y.dtype), rtol=0, atol=5 * (fisher.max() / n).sqrt()
    )
    torch.testing.assert_close(covariance, fisher, rtol=0, atol=2 * spread.item())


@pytest.mark.parametrize("output", OUTPUTS)
def test_draws_come_from_the_generator_alone(output: str) -> None:
    model, y, _ = case(output)
    before = torch.get_rng_state()
    draws = [model.sample(y, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2]) or output == "bernoulli"
    assert torch.equal(before, torch.get_rng_state())
    turned = y.mT.contiguous().mT  # how it lies in memory is nobody's concern
    assert torch.equal(model.sample(turned, torch.Generator().manual_seed(1)), draws[0])


def test_sequences_of_classes_count_every_target() -> None:
    model = qd.Categorical()
    y = torch.randn(3, 5, 4, dtype=torch.float64)
    t = torch.randint(4, (3, 5))
    t[0, 2:] = -100
    torch.testing.assert_close(
        model(y, t), torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    )
    assert int(model.terms(y, t)) == 12
    assert qd.Categorical(ignore_index=3).terms(y, t) == int((t != 3).sum())


def test_gaussian_takes_a_std_per_output() -> None:
    std = torch.tensor([0.5, 2.0], dtype=torch.float64)
    y, t = torch.randn(2, 7, 2, dtype=torch.float64)
    expected = -distributions.Normal(y, std).log_prob(t).sum() / 7
    torch.testing.assert_close(qd.Gaussian(std).double()(y, t), expected, rtol=1e-6, atol=1e-6)


class TestLearnedGaussian:
    def test_value_and_gradient_of_log_std(self) -> None:
        model = qd.LearnedGaussian(3).double()
        y, t = torch.randn(2, 8, 3, dtype=torch.float64)
        with torch.no_grad():
            model.log_std.copy_(torch.tensor([0.0, -1.0, 0.5]))
        torch.testing.assert_close(
            model(y, t), -distributions.Normal(y, model.log_std.exp()).log_prob(t).sum() / 8
        )
        (gradient,) = torch.autograd.grad(model(y, t), model.log_std)
        expected = 1 - ((y - t) / model.std).square().mean(0)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)

    def test_std_never_falls_below_its_bound(self) -> None:
        model = qd.LearnedGaussian(2, min_std=1 / 256)
        with torch.no_grad():
            model.log_std.fill_(-50.0)
        assert model.std.tolist() == pytest.approx([1 / 256] * 2)
        # At the bound with large errors the gradient must still be able to pull σ up.
        (gradient,) = torch.autograd.grad(model(torch.ones(4, 2), torch.zeros(4, 2)), model.log_std)
        assert (gradient < 0).all()

    def test_learned_std_gets_its_own_riemannian_update(self) -> None:
        """The Fisher information of ln σ is 2: the step is −lr/2 times the gradient, exactly."""
        net = torch.nn.Linear(2, 3, dtype=torch.float64)
        model = qd.LearnedGaussian(3).double()
        optimizer = qd.QDNat(net, model, lr=0.1)
        x, t = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
        model(net(x), t).backward()
        before, gradient = model.log_std.detach().clone(), model.log_std.grad.clone()
        optimizer.step()
        torch.testing.assert_close(
            model.log_std.detach(), before - 0.1 * gradient / 2, rtol=1e-7, atol=0
        )

    def test_learned_std_finds_the_noise_of_the_data(self) -> None:
        torch.manual_seed(0)
        net = torch.nn.Linear(1, 2, dtype=torch.float64)
        model = qd.LearnedGaussian(2).double()
        optimizer = qd.QDNat(net, model, lr=0.3)
        x = torch.randn(400, 1, dtype=torch.float64)
        t = x + torch.randn(400, 2, dtype=torch.float64) * torch.tensor([0.1, 1.5])
        for _ in range(60):
            optimizer.zero_grad()
            model(net(x), t).backward()
            optimizer.step()
        found = (net(x) - t).square().mean(0).sqrt()
        torch.testing.assert_close(model.std, found, rtol=1e-3, atol=0)


def test_criteria_move_and_save_like_modules() -> None:
    model = qd.LearnedGaussian(2)
    assert [name for name, _ in model.named_parameters()] == ["log_std"]
    with torch.no_grad():
        model.log_std += 1
    twin = qd.LearnedGaussian(2)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.log_std, model.log_std)


@pytest.mark.parametrize("cast", ["double", "float", "half", "bfloat16"])
def test_a_given_deviation_is_never_rounded(cast: str) -> None:
    loss = getattr(qd.Gaussian(0.7), cast)().double()
    assert float(loss.std) == 0.7
    output, target = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    expected = 3 * (1 / (2 * 0.7**2) + math.log(0.7) + math.log(2 * math.pi) / 2)
    assert float(loss(output, target)) == pytest.approx(expected, rel=1e-15)
    assert loss(output.float(), target.float()).dtype == torch.float32
    other = qd.Gaussian(0.3)
    other.load_state_dict({"std": torch.tensor(0.7)})  # as it was saved in float32
    assert float(other.std) == pytest.approx(0.7)
    assert loss.to("meta").std.device.type == "meta"


class OnDevice(qd.Categorical):
    """Counts as it does on a GPU: nobody waits for the number."""

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.tensor(super().terms(output, target))


@pytest.mark.parametrize("metric", ["outer-product", "exact", "backpropagated"])
def test_a_count_that_stays_on_the_device_is_not_rounded(metric: str) -> None:
    ends = []
    for loss in (qd.Categorical(), OnDevice()):
        model = mlp(4, 6, 3)
        x, t = batch("categorical", 23, 4, 3)
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=metric)
        loss(model(x), t).backward()
        optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("metric", ["outer-product", "monte-carlo", "exact", "backpropagated"])
def test_a_single_class_is_nothing_to_learn(metric: str) -> None:
    model, loss = mlp(4, 6, 1), qd.Categorical()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = qd.Riemannian(model, loss, lr=0.1, metric=metric)
    x, _ = batch("categorical", 8, 4, 1)
    loss(model(x), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_the_information_is_where_the_output_is() -> None:
    """A criterion that nobody has moved to the model's device has but a number to give."""
    output = torch.empty(4, 3, device="meta")
    assert qd.Gaussian().fisher(output).device == output.device


class TestLabelSmoothing:
    """Targets ``(1 - s) e_t + s/K``, as in ``nn.CrossEntropyLoss``; the model's own distribution is what it was."""

    SMOOTHING = 0.2

    def case(self) -> tuple[qd.Categorical, Tensor, Tensor]:
        y = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        t = torch.tensor([0, 3, 1, -100, 2, 2])
        return qd.Categorical(label_smoothing=self.SMOOTHING), y, t

    def test_value_and_residual(self) -> None:
        model, y, t = self.case()
        counted = t >= 0
        q = torch.full_like(y, self.SMOOTHING / 4)
        q[counted, t[counted]] += 1 - self.SMOOTHING
        expected = -(q * y.log_softmax(-1))[counted].sum() / 5
        torch.testing.assert_close(model(y, t), expected, rtol=1e-12, atol=1e-12)
        y.requires_grad_()
        (gradient,) = torch.autograd.grad(model(y, t) * 5, y)
        found = model.residual(y.detach(), t)
        torch.testing.assert_close(found[counted], gradient[counted], rtol=1e-12, atol=1e-12)

    def test_a_perfect_output_has_the_least_value(self) -> None:
        model, y, _ = self.case()
        t = torch.tensor([0, 3, 1, 1, 2, 2])
        q = torch.full_like(y, self.SMOOTHING / 4).scatter_add_(
            1, t.unsqueeze(1), torch.full((6, 1), 1 - self.SMOOTHING, dtype=y.dtype)
        )
        assert float(model(q.log(), t)) == pytest.approx(model.least_of(y), rel=1e-12)
        assert float(model(y, t)) > model.least_of(y) > 0
        assert qd.Categorical().least_of(y) == 0

    def test_draws_and_metrics_are_those_of_the_model(self) -> None:
        model, y, t = self.case()
        draw, plain = torch.tensor([1, 2, 3, 0, 1, 0]), qd.Categorical()
        torch.testing.assert_close(model.score(y, draw), plain.residual(y, draw))
        for metric in ("monte-carlo", "exact"):
            seeds = (torch.Generator().manual_seed(5) for _ in range(2))
            vectors = [[*cotangents(metric, c, y, t, 1, next(seeds))] for c in (model, plain)]
            torch.testing.assert_close(*vectors)

    def test_probabilities_are_no_classes(self) -> None:
        y = torch.randn(4, 3)
        with pytest.raises(TypeError, match=r"argmax"):
            qd.Categorical()(y, y.softmax(-1))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("samples", [1, 3])
    def test_large_outputs_are_drawn_in_parts(
        self, dtype: torch.dtype, samples: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Oracle: each part of the rows alone, one after the other, with the same generator."""
        y, t = torch.randn(7, 2, 5).to(dtype), torch.randint(5, (7, 2))
        t[3:5, 0] = -100
        model, boost = qd.Categorical(), torch.tensor(8.0)
        seeds = [torch.Generator().manual_seed(5) for _ in range(2)]
        alone = (
            cotangents("monte-carlo", model, a, b, samples, seeds[0], boost)
            for a, b in zip(y.split(3), t.split(3))
        )
        each = zip(*alone)  # the first draw of each part, then the second
        monkeypatch.setattr(metrics, "AT_ONCE", 39)  # three rows
        found = [*cotangents("monte-carlo", model, y, t, samples, seeds[1], boost)]
        assert [v.dtype for v in found] == [dtype] * samples
        for vector, parts in zip(found, each, strict=True):
            assert torch.equal(vector, torch.cat(parts)) and not vector[3:5, 0].any()

    def test_without_an_lr_it_is_fitted(self) -> None:
        """Down to a hundredth above the least value: no step promises to go below."""
        x, t = batch("categorical", 30, 6, 3)
        model, loss = mlp(6, 40, 3, activation="tanh"), qd.Categorical(label_smoothing=0.1)
        optimizer = qd.Riemannian(model, loss)
        for _ in range(60):
            optimizer.zero_grad()
            value = loss(model(x), t)
            value.backward()
            optimizer.step()
            assert optimizer.auto is not None
            if optimizer.auto.stride == 1:  # it was measured
                left = float(value.detach()) - loss.least_of(x[:, :3])
                assert optimizer.auto.promise <= left + 1e-12
        assert float(value.detach()) < loss.least_of(x[:, :3]) + 0.01

    def test_at_the_end_nothing_but_rounding_is_left_to_try(self, monkeypatch) -> None:
        trials = []
        tried = QuadraticModel._tried
        monkeypatch.setattr(QuadraticModel, "_tried", lambda *of: trials.append(0) or tried(*of))
        x, t = (z.float() if z.is_floating_point() else z for z in batch("categorical", 30, 6, 3))
        model, loss = mlp(6, 40, 3, activation="tanh").float(), qd.Categorical(label_smoothing=0.1)
        optimizer = qd.Riemannian(model, loss)
        for _ in range(400):
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()
        assert len(trials) < 100

    @pytest.mark.parametrize("smoothing", [-0.1, 1.5, math.nan])
    def test_no_other_smoothing(self, smoothing: float) -> None:
        with pytest.raises(ValueError, match="label_smoothing must be in"):
            qd.Categorical(label_smoothing=smoothing)


def test_what_is_ignored_may_have_any_number() -> None:
    y, t = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 255, 2, 1])
    model = qd.Categorical(ignore_index=255)
    (gradient,) = torch.autograd.grad(model(y, t) * 3, y)
    counted = t != 255
    residual = model.residual(y.detach(), t)
    torch.testing.assert_close(residual[counted], gradient[counted], rtol=1e-12, atol=1e-12)

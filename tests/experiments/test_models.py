"""The networks: their sizes, and the functions they start as."""

from __future__ import annotations

import math

import pytest
import torch

from quasidiag.experiments import models, tasks
from quasidiag.experiments.config import Config, UsageError

COUNTS = {
    "inversion": 79_510,
    "mnist": 1_276_810,
    "dropout": 1_276_810,
    "svhn": 1_468_810,
    "sparse": 56_310,
    "faces": 1_072_169,
    "eeg": 5_100,
    "mnist-ae": 435_536,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    experiment = tasks.find(name)
    for variant in experiment.variants:
        model, criterion = models.build(experiment.config(variant, "SGD", 0.1))
        assert models.parameter_count(model) == COUNTS[name]
        learned = 784 if name == "mnist-ae" else 0
        assert models.parameter_count(model, criterion) == COUNTS[name] + learned


def config(layers=(784, 60, 50, 40, 10), **values) -> Config:
    return Config("mnist", "sigmoid", "SGD", 0.1, "mnist", layers, 1, **values)


def test_sigmoid_starts_as_the_same_function_as_tanh():
    x = torch.rand(20, 784)
    sigmoid, _ = models.build(config(activation="sigmoid"))
    tanh, _ = models.build(config(activation="tanh"))
    torch.testing.assert_close(sigmoid(x), tanh(x), rtol=1e-4, atol=1e-5)


def test_inverted_pixels_start_as_the_same_function_of_the_picture():
    x = torch.rand(20, 784)
    given, _ = models.build(config())
    inverted, _ = models.build(config(inverted=True))
    torch.testing.assert_close(given(x), inverted(1 - x), rtol=1e-4, atol=1e-5)


def test_hidden_sigmoid_layers_have_the_authors_initialisation():
    model, _ = models.build(config(layers=(784, 800, 800, 10)))
    hidden = model[2]
    assert hidden.weight.std().item() == pytest.approx(4 / math.sqrt(800), rel=0.01)
    torch.testing.assert_close(hidden.bias, -hidden.weight.sum(1) / 2)
    model, _ = models.build(config(layers=(784, 800, 800, 10), activation="relu"))
    assert model[2].weight.std().item() == pytest.approx(1 / math.sqrt(800), rel=0.01)
    assert not model[2].bias.any()


def test_every_sparse_unit_has_ten_inputs_but_the_last_layer_is_dense():
    model, _ = models.build(tasks.find("sparse").config("sigmoid", "SGD", 0.1))
    layers = [layer for layer in model if hasattr(layer, "weight")]
    assert all(layer.weight.shape[1] == 10 for layer in layers[:-1])
    assert layers[-1].weight.shape == (10, 20)


def test_seeds_differ_and_repeat():
    first, _ = models.build(config(seed=1))
    again, _ = models.build(config(seed=1))
    other, _ = models.build(config(seed=2))
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_unknown_names_are_refused():
    with pytest.raises(UsageError, match="activation"):
        models.build(config(activation="swish"))
    with pytest.raises(UsageError, match="output"):
        models.build(config(output="poisson"))

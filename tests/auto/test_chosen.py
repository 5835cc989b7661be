"""Parts of a minibatch that are chosen by how much their samples matter (:mod:`quasidiag.strata`)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from parts import F64, Packed, directions, entry, train
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto.division import LONG
from quasidiag.auto.quadratic import MOST


def confident(x: Tensor, wrong: int) -> tuple[nn.Module, Tensor]:
    """A classifier that knows all of the samples ``x`` by heart but the last few, and its targets."""
    model = mlp(4, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
        t = model(x).argmax(1)
    t[-wrong:] = (t[-wrong:] + 1) % 3
    return model, t


def test_what_is_measured_on_the_samples_that_matter_is_what_all_of_them_say() -> None:
    """Nearly all of the loss is that of five samples of 800, which are in no share at even distances."""
    x, _ = batch("categorical", 800, 4, 3)
    model, t = confident(x, 5)
    quadratic, replay, kept = entry(model, t, x)
    start = {p: 0.99 * p.detach() for p in model.parameters()}
    few = replay.values(kept, start, quadratic._jury(kept))
    torch.testing.assert_close([*few], [*replay.values(kept, start, 1.0)], rtol=1e-3, atol=0)
    assert replay.part(kept, quadratic._jury(kept)).kept == 64
    # Along directions at random these nearly cancel, so that the other samples count as well.
    found = quadratic._form(kept, directions(model))
    quadratic.share = 1.0
    forms, slopes = quadratic._form(kept, directions(model))
    torch.testing.assert_close(found[1], slopes, rtol=0.2, atol=0)
    torch.testing.assert_close(found[0].diagonal(), forms.diagonal(), rtol=0.3, atol=0)


def test_what_is_measured_on_a_part_is_weighted_by_what_its_samples_stand_for() -> None:
    """Against a sum over single samples."""
    x, t = batch("categorical", 300, 4, 3)
    t[::7] = -100
    model = mlp(4, 6, 3, activation="tanh")
    quadratic, replay, kept = entry(model, t, x)
    along = directions(model)
    form, slopes = quadratic._form(kept, along)
    part = replay.part(kept, quadratic._measured(kept))
    assert part.kept == 64 and len({stratum.each for stratum in part.strata}) > 1
    forms, slope = torch.zeros(2, 2, dtype=F64), torch.zeros(2, dtype=F64)
    each = part.weights(part.picked.double()).tolist()
    for weight, i in zip(each, part.picked.tolist()):
        if t[i] != -100:
            y, moved = replay.rerun.run(kept, {})[i], []
            for u in along:
                h = 1e-6
                ends = [
                    replay.rerun.run(kept, {p: p.detach() + s * h * w for p, w in u.items()})[i]
                    for s in (1, -1)
                ]
                moved.append((ends[0] - ends[1]) / (2 * h))
            p = y.softmax(0)
            fisher = torch.diag(p) - torch.outer(p, p)
            moved = torch.stack(moved)
            forms += weight * moved @ fisher @ moved.T
            slope += weight * moved @ (p - torch.eye(3, dtype=F64)[t[i]])
    counted = int((t != -100).sum())
    np.testing.assert_allclose(form, (forms / counted).numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(slopes, (slope / counted).numpy(), rtol=1e-6, atol=1e-9)


def test_a_part_is_no_longer_chosen_by_what_matters_once_its_outputs_are_others() -> None:
    """A dropout that begins late: the samples that matter are those of another mask."""
    dropout = nn.Dropout(0.0)
    optimizer = qd.Riemannian(nn.Sequential(mlp(4, 6), dropout, mlp(6, 3)), qd.Categorical())
    x, t = batch("categorical", 400, 4, 3)
    assert optimizer._model is not None
    for dropout.p in (0.0, 0.5):
        assert optimizer._model.replay.division.apart is (optimizer.steps > 0)
        train(optimizer, x, t, 1)
    assert not optimizer._model.replay.division.apart


def test_in_half_precision_both_losses_of_a_part_are_computed_on_it() -> None:
    """What rounding differs by between a part and all samples is no change of the loss."""
    x, t = torch.randn(512, 64), torch.randint(10, (512,))
    for half, expected in ((False, 1), (True, 2)):
        model, loss = nn.Linear(64, 10), qd.Categorical()
        optimizer = qd.Riemannian(model, loss)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = model(x)
        loss(output.float(), t).backward()
        assert optimizer._model is not None
        replay = optimizer._model.replay
        kept, calls = replay.weighted()[0][1], []
        assert replay.division.strata(kept) is not None
        model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        now, again = replay.values(kept, {}, 0.125)
        assert len(calls) == expected
        torch.testing.assert_close(now, again)


class Groups(nn.Module):
    """Works on groups of 64 samples, which do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(-1, 64, 4)).view(-1, 3)


def test_a_chosen_part_that_does_not_run_leaves_it_to_the_whole() -> None:
    """After others that did."""
    model = Groups()
    x, t = batch("categorical", 512, 4, 3)
    quadratic, replay, kept = entry(model, t, x)
    assert replay.part(kept, 0.125).chosen
    start = {p: 0.9 * p.detach() for p in model.parameters()}
    found = replay.values(kept, start, 0.3)
    assert replay.division.divisible is False
    with torch.no_grad():
        now = qd.Categorical()(model(x), t)
        for p in model.parameters():
            p.mul_(0.9)
        after = qd.Categorical()(model(x), t)
    torch.testing.assert_close([*found], [now, after])
    quadratic._form(kept, directions(model))


def test_of_samples_with_many_terms_each_a_few_are_enough_at_even_distances() -> None:
    """As of long sequences: 64 of them would be many more terms than are needed."""
    for length, chosen in ((LONG, True), (LONG + 1, False)):
        x, t = torch.randn(128, length, 4, dtype=F64), torch.randint(3, (128, length))
        quadratic, replay, kept = entry(mlp(4, 3), t, x)
        assert (replay.division.strata(kept) is not None) is chosen
        form = replay.part(kept, quadratic._measured(kept))
        assert replay.terms(kept, form.share) < MOST + length and form.chosen is chosen


def test_samples_that_do_not_count_do_not_matter() -> None:
    x, t = batch("categorical", 400, 4, 3)
    t[:300] = -100
    _, replay, kept = entry(mlp(4, 3), t, x)
    assert replay.division.strata(kept).matter <= 100
    assert bool((replay.part(kept, 0.16).picked >= 300).sum() > 16)


def test_of_large_outputs_it_is_not_asked_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    x, t = batch("categorical", 400, 4, 3)
    _, replay, kept = entry(mlp(4, 3), t, x)
    monkeypatch.setattr("quasidiag.auto.division.LARGE", 400)
    assert replay.division.strata(kept) is None and not replay.part(kept, 0.5).chosen


def test_samples_stay_in_their_order() -> None:
    """Sequences that are packed have to be sorted by their lengths."""
    model, loss = Packed(sort=True), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, lengths = torch.randn(256, 5, 4, dtype=F64), torch.full((256,), 5)
    for k in range(3):
        t = torch.randint(3, (256, 5))
        optimizer.zero_grad()
        loss(model(x, lengths - (torch.arange(256) >= 200 + k).long()), t).backward()
        optimizer.step()
    assert optimizer._model is not None and optimizer._model.replay.division.divisible
    assert optimizer._model.replay.division.apart


def test_what_is_known_of_the_samples_is_saved() -> None:
    """After a dropout that was on for a while, training that is resumed goes on as it would have."""
    dropout = nn.Dropout(0.0)
    model = nn.Sequential(mlp(4, 6), dropout, mlp(6, 3))
    optimizer = qd.Riemannian(model, qd.Categorical())
    x, t = batch("categorical", 400, 4, 3)
    for dropout.p in (0.0, 0.5, 0.0):
        train(optimizer, x, t, 3)
    other_model = copy.deepcopy(model)
    other = qd.Riemannian(other_model, qd.Categorical())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ends = [train(o, x, t, 8) for o in (optimizer, other)]
    assert ends[0] == ends[1]

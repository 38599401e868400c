"""The batched optimizer against one matrix at a time in float64, and what it does with wild gradients."""

from __future__ import annotations

import pytest
import torch

from orchestrator.train.muon import orthogonalised
from orchestrator.train.optimizer import Optimizer


class Model:
    """Any tensors, with the Muon views and rate factors given."""

    def __init__(self, values, matrices, scales=None):
        self.values = {name: torch.nn.Parameter(value) for name, value in values.items()}
        self._matrices, self._scales = matrices, scales or {}

    def tensors(self):
        return self.values

    def matrices(self):
        return self._matrices

    def lr_scales(self):
        return self._scales


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "a.w1": (3, 6, 8),
        "a.w2": (3, 8, 6),  # the transpose of the same family
        "b.wq": (12, 5),  # two matrices in one parameter
        "b.wide": (4, 16),
        "embed.weight": (20, 4),
        "head.weight": (20, 4),
        "norm.weight": (4,),
    }
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    matrices = {"a.w1": (3, 6, 8), "a.w2": (3, 8, 6), "b.wq": (2, 6, 5), "b.wide": (1, 4, 16)}
    return Model(values, matrices, {"embed.weight": 3.0})


def gradients(model, step, size=0.02):
    generator = torch.Generator().manual_seed(100 + step)
    for value in model.values.values():
        value.grad = torch.randn(value.shape, generator=generator) * size


def reference_direction(gradient, average, momentum):
    """Nesterov momentum and Newton-Schulz of one matrix, written for one matrix only."""
    x = gradient * (1 - momentum) + average * momentum
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / torch.linalg.matrix_norm(x)
    for _ in range(5):
        g = x @ x.T
        x = 3.4445 * x - 4.7750 * g @ x + 2.0315 * g @ g @ x
    return x.T if turned else x


def test_muon_is_the_reference_matrix_by_matrix():
    model = make()
    optimizer = Optimizer(model, lr=0.01)
    expected = {}
    for name, (count, rows, columns) in model.matrices().items():
        expected[name] = model.values[name].detach().double().reshape(count, rows, columns).clone()
    averages = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(4):
        gradients(model, step)
        lr = 0.01 * (step + 1)
        for name, (count, rows, columns) in model.matrices().items():
            for i in range(count):
                gradient = model.values[name].grad.double().reshape(count, rows, columns)[i]
                averages[name][i] = 0.95 * averages[name][i] + 0.05 * gradient
                update = reference_direction(gradient, averages[name][i], 0.95) * 0.18 * max(rows, columns) ** 0.5
                expected[name][i] = expected[name][i] * (1 - lr * 0.1) - lr * update
        optimizer.step(lr)
    for name, value in expected.items():
        torch.testing.assert_close(
            model.values[name].double(), value.reshape(model.values[name].shape), atol=2e-5, rtol=0
        )


def test_update_has_the_element_size_asked_for():
    matrices = torch.randn(5, 40, 160, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() > 0.6 and values.max() < 1.3
    model = Model({"w": torch.zeros(160, 40)}, {"w": (1, 160, 40)})
    optimizer = Optimizer(model, lr=1.0, rms=0.25)
    model.values["w"].grad = matrices[0].T.contiguous()
    optimizer.step()
    assert abs(model.values["w"].square().mean().sqrt() - 0.25) < 0.05


def test_the_rest_is_adamw_with_its_own_rates_and_decay():
    model = make()
    optimizer = Optimizer(model, lr=0.01)
    copies = {
        n: torch.nn.Parameter(model.values[n].detach().clone()) for n in ("embed.weight", "head.weight", "norm.weight")
    }
    decay, scale = {"head.weight": 0.1}, {"embed.weight": 3.0}
    plain = torch.optim.AdamW(
        [{"params": [p], "lr": 0.01 * scale.get(n, 1), "weight_decay": decay.get(n, 0.0)} for n, p in copies.items()],
        betas=(0.9, 0.95),
        eps=1e-12,
    )
    for step in range(5):
        gradients(model, step)
        for name, copy in copies.items():
            copy.grad = model.values[name].grad.clone()
        optimizer.step(0.01)
        plain.step()
    for name, copy in copies.items():
        torch.testing.assert_close(model.values[name], copy, atol=1e-6, rtol=1e-5)


def test_long_gradients_are_shortened_to_one():
    one, other = make(), make()
    first, second = Optimizer(one, lr=0.01), Optimizer(other, lr=0.01)
    for step in range(3):
        gradients(one, step, size=5.0)
        gradients(other, step, size=5.0)
        norm = torch.cat([v.grad.flatten() for v in other.values.values()]).norm()
        for value in other.values.values():
            value.grad /= norm
        torch.testing.assert_close(first.step(), norm)
        second.step()
    for name, value in one.values.items():
        torch.testing.assert_close(value, other.values[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["a.w1", "norm.weight"])
def test_a_wild_gradient_changes_nothing(wild, name):
    model, other = make(), make()
    optimizer, undisturbed = Optimizer(model, lr=0.01), Optimizer(other, lr=0.01)
    for step in range(3):
        if step == 1:
            before = {n: v.detach().clone() for n, v in model.values.items()}
            gradients(model, 7)
            model.values[name].grad.view(-1)[1] = wild
            assert not torch.isfinite(optimizer.step())
            assert all(torch.equal(before[n], v) for n, v in model.values.items())
        for each, theirs in ((model, optimizer), (other, undisturbed)):
            gradients(each, step)
            theirs.step()
    assert int(optimizer.skipped) == 1 and int(undisturbed.skipped) == 0
    assert all(torch.equal(other.values[n], v) for n, v in model.values.items())


def test_a_parameter_may_miss_its_gradient():
    model = make()
    optimizer = Optimizer(model, lr=0.01)
    gradients(model, 0)
    model.values["a.w1"].grad = model.values["embed.weight"].grad = None
    before = {n: model.values[n].detach().clone() for n in ("a.w1", "embed.weight", "a.w2")}
    optimizer.step()
    assert torch.equal(model.values["embed.weight"], before["embed.weight"])
    torch.testing.assert_close(model.values["a.w1"], before["a.w1"] * (1 - 0.01 * 0.1))  # decay only
    assert not torch.equal(model.values["a.w2"], before["a.w2"])
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="step: got no gradients"):
        optimizer.step()


def test_state_goes_on_bit_by_bit():
    model, other = make(), make(seed=1)
    optimizer = Optimizer(model, lr=0.01)
    for step in range(3):
        gradients(model, step)
        optimizer.step()
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    with torch.no_grad():
        for name, value in model.values.items():
            other.values[name].copy_(value)
    restored = Optimizer(other, lr=0.01)
    restored.load_state_dict(state)
    for step in range(3, 5):
        for each, theirs in ((model, optimizer), (other, restored)):
            gradients(each, step)
            theirs.step()
    assert all(torch.equal(other.values[n], v) for n, v in model.values.items())
    with pytest.raises(ValueError, match="state: got other names"):
        restored.load_state_dict({n: v for n, v in state.items() if n != "momentum/a.w1"})
    with pytest.raises(ValueError, match=r"state: got shape \[2\] for a\.w1"):
        restored.load_state_dict(state | {"momentum/a.w1": torch.zeros(2)})


def test_refusals():
    with pytest.raises(ValueError, match="lr: got 0"):
        Optimizer(make(), lr=0)
    values = {"w": torch.zeros(4, 6)}
    with pytest.raises(ValueError, match=r"matrices: got 1 x 4 x 5 for w, allowed is a view of \[4, 6\]"):
        Optimizer(Model(values, {"w": (1, 4, 5)}), lr=1)
    with pytest.raises(ValueError, match=r"matrices: got v, allowed is a name of tensors\(\)"):
        Optimizer(Model(values, {"v": (1, 4, 6)}), lr=1)

"""Kernels and assumptions against matrices written out, loops over samples and closed forms."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import spectral_monitor.functional as F
from spectral_monitor.functional.kernels import signs
from spectral_monitor.functional.vector_norms import whole_length

RATES = (0.3, 0.05, 0.0, 0.11)


def perceptron(sizes, seed=0):
    torch.manual_seed(seed)
    weights = [torch.randn(m, n, dtype=torch.float64) * math.sqrt(2 / n) for n, m in pairwise(sizes)]
    return [W.requires_grad_() for W in weights]


def features(weights, x):
    """Outputs of the last two layers, all rows of both."""
    *before, last = weights
    for W in before[:-1]:
        x = (x @ W.T).tanh()
    hidden = x @ before[-1].T
    return hidden, hidden.tanh() @ last.T


def written_out(function, weights, rates):
    """The kernel as a matrix: of every weight all derivatives, times its rate."""
    parts = torch.autograd.functional.jacobian(function, tuple(weights))
    total = 0
    for i, rate in enumerate(rates):
        J = torch.cat([out[i].reshape(-1, weights[i].numel()) for out in parts])
        total = total + rate * J @ J.T
    return total.numpy()


@pytest.fixture(scope="module")
def case():
    weights = perceptron([5, 7, 6, 4, 3])
    x = torch.randn(2, 5, dtype=torch.float64)
    outputs = features(weights, x)
    K = written_out(lambda *W: features(W, x), weights, RATES)
    return outputs, weights, K


def split(z, outputs):
    parts = torch.as_tensor(z).split([out.numel() for out in outputs])
    return [part.view_as(out) for part, out in zip(parts, outputs, strict=True)]


def test_moments_are_exact_when_probes_are_a_basis(case):
    outputs, weights, K = case
    m = len(K)
    basis = [split(row, outputs) for row in math.sqrt(m) * torch.eye(m, dtype=torch.float64)]
    first, second = F.bfk_moments(outputs, weights, RATES, basis)
    eigenvalues = np.linalg.eigvalsh(K)
    assert first.item() == pytest.approx(eigenvalues.mean(), rel=1e-10)
    assert second.item() == pytest.approx((eigenvalues**2).mean(), rel=1e-10)
    assert F.bfk_ratio(first, second).item() == pytest.approx(np.trace(K) / m / math.sqrt(np.trace(K @ K) / m))


def test_random_signs_are_within_their_standard_error(case):
    outputs, weights, K = case
    m, count = len(K), 600
    generator = torch.Generator().manual_seed(5)
    probes = [signs((m,), generator).double() for _ in range(count)]
    first, second = F.bfk_moments(outputs, weights, RATES, [split(z, outputs) for z in probes])
    Z = torch.stack(probes).numpy()
    assert first.item() == pytest.approx(np.mean(np.sum(Z * (Z @ K), 1)) / m, rel=1e-10)
    assert second.item() == pytest.approx(np.mean(np.sum((Z @ K) ** 2, 1)) / m, rel=1e-10)
    for value, matrix in ((first, K), (second, K @ K)):
        variance = 2 * (np.sum(matrix**2) - np.sum(np.diag(matrix) ** 2)) / m**2  # of one probe, by Hutchinson
        assert abs(value.item() - np.trace(matrix) / m) < 3 * math.sqrt(variance / count)


def test_moments_are_the_same_in_autocast():
    torch.manual_seed(0)
    single = [torch.randn(30, 20, requires_grad=True), torch.randn(10, 30, requires_grad=True)]
    out = (torch.randn(8, 20) @ single[0].T).tanh() @ single[1].T
    probes = [[signs(out.shape, torch.Generator().manual_seed(0))]]
    plain = F.bfk_moments([out], single, RATES[:2], probes)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.bfk_moments([out], single, RATES[:2], probes) == plain


def test_estimates_by_signs_never_exceed_one(case):
    outputs, weights, _ = case
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        probes = [[signs(out.shape, generator) for out in outputs] for _ in range(2)]
        assert 0 < F.bfk_ratio(*F.bfk_moments(outputs, weights, RATES, probes)).item() <= 1 + 1e-12


def test_the_cosine_lies_between_the_extreme_eigenvalues_and_one(case):
    """Theorem 3.2: of cos = <b, K b> / (|K b| |b|), whatever b is."""
    _, _, K = case
    shifted = K + 0.5 * np.trace(K) / len(K) * np.eye(len(K))
    eigenvalues = np.linalg.eigvalsh(shifted)
    for b in np.random.default_rng(0).normal(size=(50, len(K))):
        moved = torch.as_tensor(-shifted @ b)
        cosine = F.backward_feature_cosine(moved, torch.as_tensor(b)).item()
        assert eigenvalues[0] / eigenvalues[-1] <= cosine <= 1


def test_of_gaussian_gradients_the_cosine_is_the_ratio():
    """In a wide network, by the kernel that is written out and by probes alike."""
    width = 160
    weights = perceptron([20, width, width], seed=1)
    x = torch.randn(1, 20, dtype=torch.float64)

    def outputs(*W):
        return ((x @ W[0].T).relu() @ W[1].T,)

    rates = (60.0, 1.0)
    K = torch.as_tensor(written_out(outputs, weights, rates))
    b = torch.randn(width, 200, dtype=torch.float64)
    moved = K @ b
    cosines = (moved * b).sum(0) / (moved.norm(dim=0) * b.norm(dim=0))
    exact = F.bfk_ratio(K.trace() / width, (K @ K).trace() / width).item()
    assert exact < 0.9, "not the identity, for which there is nothing to show"
    assert cosines.mean().item() == pytest.approx(exact, rel=0.01)
    generator = torch.Generator().manual_seed(0)
    probes = [[signs((1, width), generator)] for _ in range(8)]
    assert F.bfk_ratio(*F.bfk_moments(outputs(*weights), weights, rates, probes)).item() == pytest.approx(
        exact, rel=0.03
    )


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (0, 3)], ids=str)
def test_lengths_are_of_all_entries(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert whole_length(x).item() == pytest.approx(math.sqrt(sum(a * a for a in x.flatten().tolist())), rel=1e-12)


def test_the_length_of_many_entries_is_summed_row_by_row():
    """One sum of all would be off by a thousandth."""
    x = torch.full((1500, 2000), 0.1)
    assert whole_length(x).item() == pytest.approx(0.1 * math.sqrt(x.numel()), rel=1e-6)


def test_moments_in_half_precision_may_disagree_by_its_rounding():
    """The check that an operation has a second derivative is by a number that is had twice."""
    generator, widest = torch.Generator().manual_seed(0), 0.0
    for _ in range(40):
        W = [torch.randn(6, 6, generator=generator).div(2).bfloat16().requires_grad_() for _ in range(3)]
        x = torch.randn(6, generator=generator).bfloat16()

        def outputs(W, x):
            for layer in W:
                x = torch.tanh(layer @ x)
            return x

        z = signs((6,), generator)
        m1, _ = F.bfk_moments([outputs(W, x)], W, [0.1] * 3, [[z]])
        exact = [layer.detach().double().requires_grad_() for layer in W]
        expected, _ = F.bfk_moments([outputs(exact, x.double())], exact, [0.1] * 3, [[z]])
        widest = max(widest, abs(m1.item() / expected.item() - 1))
    assert 0.01 < widest < 0.1


def test_a_complex_weight_is_its_real_and_its_imaginary_part():
    torch.manual_seed(0)
    f, W = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 2, dtype=torch.complex128)
    parts = [W.real.clone().requires_grad_(), W.imag.clone().requires_grad_()]
    found = []
    for weight, leaves in ((torch.complex(*parts), parts), (W.requires_grad_(), [W])):
        rates, hidden = [0.1] * len(leaves), f.cdouble() @ weight
        outputs = hidden.abs() + (hidden * hidden).imag
        basis = [split(row, [outputs]) for row in torch.eye(6, dtype=torch.float64)]
        wide = [split(row, [f]) for row in torch.eye(12, dtype=torch.float64)]
        moments = F.bfk_moments([outputs], leaves, rates, basis)
        extremes = F.bfk_extremes([outputs], leaves, rates, basis[1], 6)
        dual = F.dual_bfk_moments((outputs**3).sum(), [f], leaves, rates, wide)
        found.append(torch.stack([*moments, *extremes, *dual]))
    torch.testing.assert_close(found[1], found[0])
    assert (found[0] > 0).all()


def test_what_does_not_lead_to_the_outputs_adds_nothing(case):
    outputs, weights, _ = case
    apart = torch.ones(3, dtype=torch.float64, requires_grad=True)
    probes = [[signs(out.shape, torch.Generator().manual_seed(0)) for out in outputs]]
    alone = F.bfk_moments(outputs, weights, RATES, probes)
    both = F.bfk_moments(outputs, [*weights, apart], [*RATES, 9.0], probes)
    assert [value.item() for value in alone] == [value.item() for value in both]
    nothing = F.bfk_moments(outputs, [apart], [9.0], probes)
    assert [value.item() for value in nothing] == [0.0, 0.0]
    assert math.isnan(F.bfk_ratio(*nothing).item())


@pytest.mark.parametrize("apart", [0, 1])
def test_outputs_apart_add_kernels_of_their_own(apart):
    """No parameter of one leads to the other, and one of them may have a rate of zero."""
    W, V = perceptron([5, 4], seed=1) + perceptron([3, 2], seed=2)
    x, z = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    rates = [0.3, 0.7]
    rates[apart] = 0.0
    outputs = (x @ W.T, z @ V.T)
    K = written_out(lambda W, V: (x @ W.T, z @ V.T), [W, V], rates)
    m = len(K)
    basis = [split(row, outputs) for row in math.sqrt(m) * torch.eye(m, dtype=torch.float64)]
    first, second = F.bfk_moments(outputs, [W, V], rates, basis)
    assert first.item() == pytest.approx(np.trace(K) / m, rel=1e-10)
    assert second.item() == pytest.approx(np.trace(K @ K) / m, rel=1e-10)


def test_gradients_are_left_alone(case):
    outputs, weights, _ = case
    F.bfk_moments(outputs, weights, RATES, [[torch.ones_like(out) for out in outputs]])
    assert all(W.grad is None for W in weights)
    assert torch.autograd.grad(outputs[1].sum(), weights[0], retain_graph=True)[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"probes": []}, "0 probes"),
        ({"rates": [1.0]}, "1 rates for 4 parameters"),
        ({"probes": [[torch.ones(2)]]}, r"probes must be like the outputs \[\(2, 4\), \(2, 3\)\]"),
        ({"outputs": [torch.ones(2, 4), torch.ones(2, 3)]}, "must have a graph"),
    ],
    ids=["no probes", "rates", "shapes", "no graph"],
)
def test_misuse_of_moments(case, change, said):
    outputs, weights, _ = case
    right = {"outputs": outputs, "parameters": weights, "rates": RATES, "probes": [[out.detach() for out in outputs]]}
    with pytest.raises(ValueError, match=said):
        F.bfk_moments(**{**right, **change})


def test_kernel_change_is_that_of_all_inner_products():
    torch.manual_seed(2)
    h, after = torch.randn(6, 9, dtype=torch.float64), torch.randn(6, 9, dtype=torch.float64)
    before = np.array([[np.dot(a, b) for b in h.numpy()] for a in h.numpy()])
    then = np.array([[np.dot(a, b) for b in after.numpy()] for a in after.numpy()])
    expected = math.sqrt(np.sum((then - before) ** 2)) / math.sqrt(np.sum(before**2))
    assert F.kernel_change(h, after).item() == pytest.approx(expected, rel=1e-12)
    rotation = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64)).Q
    assert F.kernel_change(h, h @ rotation).item() < 1e-14
    assert F.kernel_change(h, 1.1 * h).item() == pytest.approx(0.21, rel=1e-12)


def test_kernel_change_keeps_its_digits_where_changes_are_small():
    torch.manual_seed(3)
    h = torch.randn(20, 30)
    after = h + 1e-5 * torch.randn(20, 30)
    h64, after64 = h.double(), after.double()
    difference = after64 @ after64.T - h64 @ h64.T
    exact = difference.norm() / (h64 @ h64.T).norm()
    assert F.kernel_change(h, after).item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_backward_speed(dtype):
    b, after = torch.tensor([[3.0, 4.0]], dtype=dtype), torch.tensor([[3.0, 7.0]], dtype=dtype)
    assert F.backward_speed(b, after).item() == pytest.approx(3 / 5)
    assert F.backward_speed(b, after).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert math.isnan(F.backward_speed(0 * b, after).item())


def test_weight_cancellation_by_singular_values():
    torch.manual_seed(4)
    W, dW = torch.randn(2, 3, 8, 5, dtype=torch.float64), torch.randn(2, 3, 8, 5, dtype=torch.float64)
    largest = [np.linalg.svd(A.numpy(), compute_uv=False)[..., 0] for A in (W + dW, W, dW)]
    expected = largest[0] / (largest[1] + largest[2])
    np.testing.assert_allclose(F.weight_cancellation(W, dW, exact=True), expected, rtol=1e-10)
    np.testing.assert_allclose(F.weight_cancellation(W, -W, exact=True), np.zeros((2, 3)), atol=1e-12)
    np.testing.assert_allclose(F.weight_cancellation(W, 0.1 * W, exact=True), np.ones((2, 3)), rtol=1e-10)


@pytest.mark.parametrize(("dtype", "entry"), [(torch.float16, 4e4), (torch.bfloat16, 2e38), (torch.float32, 2e38)])
def test_weight_cancellation_of_what_adds_up_beyond_its_range(dtype, entry):
    W = torch.zeros(3, 3, dtype=dtype)
    W[0, 0] = entry
    assert F.weight_cancellation(W, W).item() == pytest.approx(1)


def test_feature_cancellation_row_by_row():
    torch.manual_seed(5)
    h, dh = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    h[2] = dh[2] = 0
    shares = [
        np.linalg.norm(a + b) / (np.linalg.norm(a) + np.linalg.norm(b))
        for a, b in zip(h.numpy(), dh.numpy(), strict=True)
        if np.any(a)
    ]
    assert F.feature_cancellation(h, dh).item() == pytest.approx(np.mean(shares), rel=1e-12)
    assert F.feature_cancellation(h, -h).item() == 0


def test_activation_ratio_of_relu_is_one_over_the_root_of_two():
    h = torch.randn(200, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ratio = F.activation_ratio(h, h.relu()).item()
    written = [math.sqrt(sum(max(x, 0) ** 2 for x in row) / sum(x**2 for x in row)) for row in h.tolist()]
    assert ratio == pytest.approx(sum(written) / len(written), rel=1e-12)
    assert ratio == pytest.approx(1 / math.sqrt(2), rel=0.01)
    with pytest.raises(ValueError, match="must have one shape"):
        F.activation_ratio(h, h[1:])


def test_sample_share_sample_by_sample():
    torch.manual_seed(6)
    layer = nn.Linear(7, 5, bias=False, dtype=torch.float64)
    x = torch.randn(9, 7, dtype=torch.float64)
    out = layer(x)
    loss = nn.functional.cross_entropy(out, torch.arange(9) % 5)
    (b,) = torch.autograd.grad(loss, out, retain_graph=True)
    loss.backward()
    g, shares = layer.weight.grad, []
    for i in range(9):
        layer.zero_grad()
        one = nn.functional.cross_entropy(layer(x[i : i + 1]), torch.tensor([i % 5])) / 9
        (own,) = torch.autograd.grad(one, layer.weight)
        shares.append(((own @ x[i]).norm() / (g @ x[i]).norm()).item())
    assert F.sample_share(x, b).item() == pytest.approx(np.mean(shares), rel=1e-10)
    some = torch.tensor([1, 4, 8])
    assert F.sample_share(x, b, some).item() == pytest.approx(np.mean([shares[i] for i in some]), rel=1e-10)


def test_sample_share_of_what_is_alike_and_of_what_is_orthogonal():
    b = torch.ones(8, 3)
    assert F.sample_share(torch.ones(8, 5), b).item() == pytest.approx(1 / 8)
    assert F.sample_share(torch.eye(8), b).item() == pytest.approx(1)
    with pytest.raises(ValueError, match="as many rows"):
        F.sample_share(torch.ones(8, 5), b[1:])


def test_what_adds_up_is_never_more_than_all_of_it():
    """The norms are rounded: of one time in seven the sum's is larger than the sum of both."""
    above = 0
    for seed in range(40):
        W = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        both, first, second = (float(torch.linalg.matrix_norm(A, 2)) for A in (1.3 * W, W, 0.3 * W))
        found = float(F.weight_cancellation(W, 0.3 * W))
        assert found <= 1
        assert found == pytest.approx(both / (first + second), rel=1e-6)
        parts = [F.spectral_norm(A) for A in (W / 2, 0.3 * W / 2, W / 2 + 0.3 * W / 2)]
        above += bool(parts[2] > parts[0] + parts[1])
    assert above


def test_kernels_of_other_rows_are_refused():
    for rows in (2, 4):
        with pytest.raises(ValueError, match="one shape"):
            F.kernel_change(torch.ones(3, 2), torch.ones(rows, 2))

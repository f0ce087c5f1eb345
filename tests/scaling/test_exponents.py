"""The classifier against the paper's Table 1, its theorems written a second time, and networks that take a step."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import torch

from spectral_monitor.scaling import ABC, abc, mean_field, mup, ntp, standard, uniform

HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("parametrization", "r", "regime"),
    [
        *[(standard(hidden), HALF, "kernel") for hidden in (2, 3, 7)],
        *[(ntp(hidden), HALF, "kernel") for hidden in (1, 2, 3, 7)],
        (mean_field(), 0, "feature learning"),
        *[(mup(hidden), 0, "feature learning") for hidden in (1, 2, 3, 7)],
    ],
)
def test_table_1(parametrization, r, regime):
    """Its rows: r, 2a_(L+1) + c = 1, a_(L+1) + b_(L+1) + r = 1, nontrivial, stable, feature learning, kernel."""
    found = parametrization.classify()
    assert found.r == r
    assert 2 * parametrization.a[-1] + parametrization.c == 1
    assert parametrization.a[-1] + parametrization.b[-1] + found.r == 1
    assert (found.stable, found.trivial, found.regime) == (True, False, regime)
    assert found.maximally_updated[-1]
    assert found.readout_maximally_initialized


def test_mean_field_is_mup_of_one_hidden_layer():
    """Up to the symmetry (paper, section 5)."""
    assert mean_field().shifted(-HALF) == mup(1)


GRID = [Fraction(k, 2) for k in range(-2, 4)]
TWO_HIDDEN = [
    ABC((a1, a2, a3), (-a1, HALF - a2, b3), c)
    for a1, a2, a3, b3, c in product(GRID, [Fraction(-1, 2), Fraction(0), HALF], GRID, GRID, GRID)
]
"""Those with sound features at the start, of two hidden layers, on a grid."""


def written_again(p):
    """Theorems 3.3, 3.4, 3.8 as they stand in the paper, in floating point."""
    a, b, c = [float(x) for x in p.a], [float(x) for x in p.b], float(p.c)
    hidden = len(a) - 1
    r = min(a[hidden] + b[hidden], 2 * a[hidden] + c) + c - 1 + min(2 * a[i] + (i == 0) for i in range(hidden))
    if not (r >= 0 and a[hidden] + b[hidden] >= 0.5 and 2 * a[hidden] + c >= 1 and a[hidden] + b[hidden] + r >= 1):
        return r, "unstable"
    if not (a[hidden] + b[hidden] + r == 1 or 2 * a[hidden] + c == 1):
        return r, "trivial"
    return r, "feature learning" if r == 0 else "kernel"


def test_the_polyhedron():
    regimes = []
    for p in TWO_HIDDEN:
        found = p.classify()
        assert (found.r, found.regime) == written_again(p)
        regimes.append(found.regime)
    assert set(regimes) == {"feature learning", "kernel", "trivial", "unstable"}


def test_the_symmetry_changes_nothing():
    for p in TWO_HIDDEN[::7]:
        for theta in (-1, Fraction(1, 3), 0.25):
            twin = p.shifted(theta)
            assert twin.classify() == p.classify()
            assert (twin.init_exponents, twin.lr_exponents) == (p.init_exponents, p.lr_exponents)


def test_mup_is_the_only_one_that_is_maximal_everywhere():
    """Theorem 5.6, on the grid."""
    maximal = []
    for p in TWO_HIDDEN:
        found = p.classify()
        if found.stable and all(found.maximally_updated) and found.readout_maximally_initialized:
            maximal.append(p)
    assert len(maximal) > 1
    assert {p.shifted(-HALF - p.a[0]) for p in maximal} == {mup(2)}


@pytest.mark.parametrize(
    ("change", "face"),
    [
        ({"a": 0.5}, "inputs"),
        ({"b2": 0.25}, "hidden layers"),
        ({"b3": -0.25}, "outputs at the start"),
        ({"c": -0.125}, "features: r >= 0"),
    ],
)
def test_each_face_is_named(change, face):
    a, b, c = [-0.5, 0, 0.5], [0.5, 0.5, 0.5], 0.0
    a[0] += change.get("a", 0)
    b[1] += change.get("b2", 0)
    b[2] += change.get("b3", 0) * 3
    c += change.get("c", 0)
    found = abc(a, b, c).classify()
    assert found.regime == "unstable"
    assert any(text.startswith(face) for text in found.violated)


def test_standard_parametrization_needs_small_learning_rates():
    """Theorem 4.1."""
    for c in (0, 0.5, 0.999):
        assert standard(3, c).classify().regime == "unstable"
    assert standard(3, 1).classify().regime == "kernel"
    assert standard(3, 1.25).classify().regime == "trivial"


def one_step(p, n, seed, nonlinearity, trained=None):
    """RMS change of the last features, change of the output by one step of SGD on one input, and the output before it,
    as RMS over draws of the readout; all in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, 1), *[(n, n)] * (p.hidden - 1), (1, n)]
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * n ** float(e)
        for shape, e in zip(shapes, p.init_exponents, strict=True)
    ]
    for weight in weights:
        weight.requires_grad_()

    def forward():
        x = torch.ones(1, dtype=torch.float64)
        for weight in weights[:-1]:
            x = nonlinearity(weight @ x)
        return x, (weights[-1] @ x).squeeze()

    features, output = forward()
    output.backward()  # a loss whose derivative does not depend on chance
    with torch.no_grad():
        for place, (weight, e) in enumerate(zip(weights, p.lr_exponents, strict=True)):
            if trained is None or place in trained:
                weight -= 0.1 * n ** float(e) * weight.grad
        after, moved = forward()
    began = features.norm().item() * n ** float(p.init_exponents[-1])
    return (after - features).square().mean().sqrt().item(), abs((moved - output).item()), began


def slope(p, index, **options):
    """Of the logarithm of a change against that of the width."""
    widths = [128, 256, 512, 1024]
    logs = [
        sum(math.log(one_step(p, n, seed, **options)[index]) for seed in range(12)) / 12 for n in widths
    ]  # fmt: skip
    xs = [math.log(n) for n in widths]
    mean = sum(xs) / len(xs)
    return sum((x - mean) * y for x, y in zip(xs, logs, strict=True)) / sum((x - mean) ** 2 for x in xs)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "p", [standard(2), ntp(2), mup(2), ntp(3), mup(3), abc((0, 0, 0.5), (0, 0.5, 0.5), 0.5)], ids=str
)
def test_features_of_real_networks_move_as_told(p):
    """By n^-r, up to what 12 draws of four widths leave open."""
    assert slope(p, 0, nonlinearity=torch.tanh) == pytest.approx(-float(p.classify().r), abs=0.1)


BODY_NTK, NNGP = abc((0, 0.5, 1), (0, 0, -0.5), 0), abc((0.25, 0.75, 0.5), (-0.25, -0.25, 0), 0)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("p", "limit", "body", "readout"),
    [
        (ntp(2), "NTK", 0, 0),
        (uniform(2, 0.25), "NTK", 0, 0),
        (BODY_NTK, "body NTK", 0, -1),
        (NNGP, "NNGP", -0.5, 0),
        (mup(2), "feature learning", 0, 0),
    ],
    ids=str,
)
def test_what_reaches_the_output_names_the_limit(p, limit, body, readout):
    """Of one step: what hidden matrices do to the output, what the readout does, as powers of the width."""
    assert p.classify().limit == limit
    assert slope(p, 1, nonlinearity=torch.tanh, trained={0, 1}) == pytest.approx(body, abs=0.1)
    assert slope(p, 1, nonlinearity=torch.tanh, trained={2}) == pytest.approx(readout, abs=0.1)


@pytest.mark.few(2)
@pytest.mark.parametrize("p", [ntp(2), mup(2), uniform(2, 0.25), abc((0, 0, 0.5), (0, 0.5, 0.5), 0.5)], ids=str)
def test_outputs_at_the_start(p):
    """The limit of ntp begins as a Gaussian process, those that learn features begin at zero (Corollary 3.10)."""
    found = p.classify()
    assert slope(p, 2, nonlinearity=torch.tanh) == pytest.approx(float(found.output_at_start), abs=0.1)
    assert found.r > 0 or found.output_at_start < 0


def test_corollary_3_10_on_the_grid():
    learning = [found for p in TWO_HIDDEN if (found := p.classify()).regime == "feature learning"]
    assert len(learning) > 10
    assert all(found.output_at_start < 0 for found in learning)


@pytest.mark.parametrize("r", [0, Fraction(1, 4), Fraction(1, 3), HALF])
def test_uniform_parametrizations(r):
    """Theorem G.4: of that r, all hidden matrices alike, the readout maximal in both ways, from muP to ntp."""
    found = uniform(3, r).classify()
    assert (found.r, found.r_layers, found.uniformly_updated) == (r, (r,) * 3, True)
    assert found.maximally_updated[-1]
    assert found.readout_maximally_initialized
    assert (uniform(3, 0), uniform(3, HALF)) == (mup(3), ntp(3))


def test_uniform_ends_at_one_half():
    with pytest.raises(ValueError, match=r"r must lie in \[0, 1/2\].*got 3/4"):
        uniform(2, 0.75)


def test_layers_that_learn():
    """Theorem H.13: from the first whose own update moves its features by order 1."""
    late = abc((0, 0, 0.5), (0, 0.5, 0.5), 0)  # the first hidden matrix has too small a learning rate
    assert late.classify().r_layers == (1, 0)
    assert late.classify().learns_from == 2
    assert not late.classify().uniformly_updated
    assert mup(3).classify().learns_from == 1
    assert ntp(3).classify().learns_from is None
    assert slope(late, 0, nonlinearity=torch.tanh) == pytest.approx(0, abs=0.1)


def test_features_may_move_where_outputs_stand_still():
    """Footnote 22: r = 0, and trivial."""
    p = abc((-0.5, 100.5), (0.5, 0.5), -100)
    found = p.classify()
    assert (found.regime, found.r, found.learns_from, found.limit) == ("trivial", 0, 1, "")
    assert str(found).endswith("features move from layer 1 on, and outputs do not")


def identity(x):
    return x


@pytest.mark.few(1)
@pytest.mark.parametrize("c", [0.5, 0.75, 1.0])
def test_outputs_blow_up_in_standard_parametrization(c):
    """The example of section 4: two hidden layers, linear, the middle one trained: the output moves by n^(1 - c)."""
    found = slope(standard(2, c), 1, nonlinearity=identity, trained={1})
    assert found == pytest.approx(1 - c, abs=0.1)


@pytest.mark.parametrize(("a", "b"), [((0,), (0,)), ((0, 0), (0,)), ((), ())])
def test_what_is_no_network_is_refused(a, b):
    with pytest.raises(ValueError, match="an exponent for each of at least two matrices"):
        abc(a, b, 0)

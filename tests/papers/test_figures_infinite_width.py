"""Table 1, the caricature and section 4 of Feature Learning in Infinite-Width Neural Networks, by the scripts."""

from __future__ import annotations

import sys
from fractions import Fraction

import infinite_width_sp
import infinite_width_table1
import pytest
import torch
from spectral_panels import slope_of
from torch import nn

from spectral_monitor.scaling import mup, ntp, standard

HALF = Fraction(1, 2)

# The paper's Table 1: r, 2 a_(L+1) + c, a_(L+1) + b_(L+1) + r, nontrivial, stable, feature learning, kernel.
TABLE_1 = {
    "SP, lr 1/n": ("1/2", "1", "1", True, True, False, True),
    "NTP": ("1/2", "1", "1", True, True, False, True),
    "mean field": ("0", "1", "1", True, True, True, False),
    "muP": ("0", "1", "1", True, True, True, False),
}


def test_table_1():
    rows = {row["parametrization"]: tuple(row.values())[4:] for row in infinite_width_table1.table()}
    assert {name: row for name, row in rows.items() if name in TABLE_1} == TABLE_1
    assert rows["SP, lr 1"] == ("-1", "0", "-1/2", False, False, False, False)


@pytest.mark.slow
def test_the_table_is_printed_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path)])
    infinite_width_table1.main()
    assert (tmp_path / "infinite_width_table1.png").stat().st_size > 20_000
    assert (tmp_path / "infinite_width_table1.csv").read_text().count("\n") == 6
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["feature learning"].split()[2:] == ["-", "-", "yes", "yes", "-"]


GRID = [(Fraction(x, 8), Fraction(y, 8)) for x in range(-4, 17) for y in range(-8, 13)]


def test_the_facets():
    """What the coordinates mean, and the borders that Theorem 3.3 gives in them."""
    seen = set()
    for r, y in GRID:
        p = infinite_width_table1.on_the_facets(r, y)
        found = p.classify()
        assert (found.r, p.c, p.a[0] + p.b[0]) == (r, 0, 0)
        assert found.maximally_updated[-1] == (y >= 0)
        assert found.readout_maximally_initialized == (y <= 0)
        stable = r >= 0 and (y >= r - HALF if y >= 0 else r <= HALF)
        assert found.regime == ("unstable" if not stable else "feature learning" if r == 0 else "kernel")
        seen.add(found.regime)
    assert seen == {"unstable", "feature learning", "kernel"}


def test_who_stands_where_on_the_facets():
    """Up to the symmetry, under which c = 0."""
    at = infinite_width_table1.on_the_facets
    assert at(Fraction(0), Fraction(0)) == mup(1)
    assert at(HALF, Fraction(0)) == ntp(1)
    assert at(3 * HALF, Fraction(1)) == standard(1).shifted(HALF)


def test_the_plane_around_the_standard_parametrization():
    """Theorem 4.1: below c = 1 all blow up, above it none that begins small enough is trained."""
    for c, b in GRID:
        regime = infinite_width_table1.near_standard(c, b).classify().regime
        if c < 1 or b < HALF:
            assert regime == "unstable"
        else:
            assert regime == ("kernel" if c == 1 else "trivial")


@pytest.mark.parametrize("c", [HALF, Fraction(3, 4), Fraction(1), Fraction(2)])
def test_the_first_step_changes_features_as_any_other_does(c):
    """While the readout's updates are not larger than what it began with."""
    p = standard(2, c)
    expected = infinite_width_sp.first_step(p)
    r_1, r_2 = p.classify().r_layers
    assert (expected["change_1"], expected["change_2"]) == (-r_1, -r_2)


@pytest.mark.parametrize("c", infinite_width_sp.CS)
def test_the_first_step_by_the_paper(c):
    """Section 4: f_1 - f is of order n^(1-c), the second hidden layer changes by n^(1-c) entries of the readout; the
    first (section 5.1) by n^-c entries of the gradient.
    """
    assert infinite_width_sp.first_step(standard(2, c)) == {
        "change_1": -c - HALF,
        "change_2": 1 - c - HALF,
        "change_3": 1 - c,
    }


@pytest.mark.parametrize("c", infinite_width_sp.CS)
def test_a_row_is_what_the_step_did(c, monkeypatch):
    """Against float64 and nothing but matrix products."""
    steps, n = 2, 48
    kept = {}

    class Keeping(nn.Sequential):
        def forward(self, x):
            kept.setdefault("weights", [p.detach().double().clone() for p in self.parameters()])
            return super().forward(x)

    monkeypatch.setattr(nn, "Sequential", Keeping)
    monkeypatch.setattr(infinite_width_sp, "STEPS", steps)
    torch.manual_seed(0)
    x = nn.functional.normalize(torch.randn(1, 30))
    row = infinite_width_sp.train(c, n, x)

    rate = infinite_width_sp.LR * n ** -float(c)
    U, W, V = kept["weights"]
    assert [w.std().item() for w in (U, W, V)] == pytest.approx([1, n**-0.5, n**-0.5], rel=0.3)
    x = x.double().squeeze()
    history = []
    for _ in range(steps + 1):
        h1, h2, f = U @ x, W @ (U @ x), V @ (W @ (U @ x))
        history.append((h1, h2, f))
        error = f - infinite_width_sp.TARGET
        b2 = V.T @ error
        b1 = W.T @ b2
        U, W, V = U - rate * torch.outer(b1, x), W - rate * torch.outer(b2, h1), V - rate * torch.outer(error, h2)
    for place, number in enumerate((1, 2, 3)):
        start, after, end = history[0][place], history[1][place], history[-1][place]
        assert row[f"change_{number}"] == pytest.approx((after - start).square().mean().sqrt().item(), rel=1e-3)
        assert row[f"drift_{number}"] == pytest.approx(((end - start).norm() / start.norm()).item(), rel=1e-3)
    assert [row[f"output_{t}"] for t in range(steps)] == pytest.approx(
        [abs(f.item()) for _, _, f in history[:-1]], rel=1e-4
    )


@pytest.fixture(scope="module")
def trained():
    return list(infinite_width_sp.sweep(None, **infinite_width_sp.QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("c", infinite_width_sp.CS)
def test_section_4(trained, c):
    for key, expected in {"change_1": -c - HALF, "change_2": HALF - c, "change_3": 1 - c}.items():
        assert slope_of(trained, key, c=str(c)).slope == pytest.approx(float(expected), abs=0.15)


@pytest.mark.slow
def test_at_c_1_features_stand_still_and_outputs_are_trained(trained):
    """-r_l of the calculus, over several steps; the output comes nearer to the target at every width."""
    for key, r in zip(("drift_1", "drift_2"), standard(2).classify().r_layers, strict=True):
        assert slope_of(trained, key, c="1").slope == pytest.approx(-float(r), abs=0.15)
    last = f"output_{infinite_width_sp.STEPS - 1}"
    for row in trained:
        if row["c"] == "1":
            assert 1.5 < row[last] < infinite_width_sp.TARGET


@pytest.mark.slow
def test_below_c_1_outputs_blow_up(trained):
    for row in trained:
        if row["c"] == "0":
            assert not row["output_2"] < 100 * infinite_width_sp.TARGET  # or out of floating point range
    wide = [row for row in trained if row["c"] == "1/2" and row["width"] == max(r["width"] for r in trained)]
    assert all(row["output_4"] > 100 * row["output_0"] for row in wide)

"""The benchmark of the certificate: planted values are the matrices' own, and a laxer certificate is found out."""

from __future__ import annotations

import pytest
import torch

from benchmarks import sections
from benchmarks.accuracy import certificate
from benchmarks.accuracy.certificate import FAMILIES, clopper_pearson, complaints, make, one_round
from spectral_monitor.linalg import SpectralEstimate
from spectral_monitor.linalg import spectral_norms as estimate_module


@pytest.mark.slow
def test_planted_values_are_the_singular_values():
    planted = 0
    for seed in range(2):
        for name, (_, (A, values)) in make(seed).items():
            assert A.dtype == torch.float32
            if values is not None:
                planted += 1
                truth = torch.linalg.svdvals(A[:2].double())
                torch.testing.assert_close(values[:2, 0], truth[:, 0], rtol=certificate.PLANTED_ERROR, atol=0, msg=name)
    assert planted > 10


def test_a_round_is_its_seed_and_nothing_is_missed():
    found = one_round(3)
    assert [row["family"] for row in found] == list(FAMILIES)
    assert found == one_round(3)
    assert not any(row[word] for row in found for word in certificate.BROKEN)


def test_a_certificate_that_promises_nothing_is_found_out(monkeypatch):
    monkeypatch.setattr(estimate_module, "MAX_MISS_PROBABILITY", 1e6)
    assert sum(len(row["missed"]) for row in one_round(3)) > certificate.PER_ROUND / 5


def test_each_promise_is_checked_by_itself():
    values = torch.tensor([[1.0, 0.5]], dtype=torch.float64)

    def broken(sigma, low, bound, high):
        columns = (torch.tensor([x]) for x in (sigma, low, bound, high))
        found = complaints(SpectralEstimate(*columns, torch.ones(1), 1), values)
        return [word for word in certificate.BROKEN if bool(found[word])]

    assert broken(0.995, 0.994, 0.01, 1.1) == []
    assert broken(0.989, 0.989, 0.02, 1.1) == ["missed"]
    assert broken(1.0, 1.001, 0.01, 1.1) == ["low"]
    assert broken(1.0, 0.99, 0.01, 0.999) == ["high"]
    assert broken(0.995, 0.99, 0.001, 1.1) == ["near"]


def test_the_bound_is_that_of_clopper_and_pearson():
    """Of no failure in n trials it is 1 - 0.05^(1/n); of one, the p with (1-p)^n + n p (1-p)^(n-1) = 0.05."""
    assert clopper_pearson(0, 200) == pytest.approx(1 - 0.05 ** (1 / 200))
    p, n = clopper_pearson(1, 50), 50
    assert (1 - p) ** n + n * p * (1 - p) ** (n - 1) == pytest.approx(0.05)
    assert clopper_pearson(5, 5) == 1


def test_a_section_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n")
    sections.write(page, "a", "new")
    sections.write(page, "a", "newer")
    assert page.read_text() == "before\n<!-- a -->\n\nnewer\n\n<!-- end of a -->\nafter\n"
    with pytest.raises(ValueError, match="no part between"):
        sections.write(page, "b", "new")

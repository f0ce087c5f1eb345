"""The figures of the page: which layers are drawn, what they are called, and where a band is an area."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from spectral_monitor import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.html.curves import sampled
from tests.reporting.test_report import deep, layers_of, page_of, verdict


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_only_layers_that_share_a_band_have_an_area(order):
    """Two layers, each with its own band, then three of which two share one, then two and two."""

    def bands(*kinds):
        limits = {0: [0.5, 8.0, 2.0], 1: [1.0, 4.0, 2.0], 2: [0.1, 16.0, 2.0]}
        names = [f"net.{i}" for i in range(len(kinds))]
        values = {"update_natural": torch.ones(len(kinds))}
        band = {"update_natural": torch.tensor([limits[order[kind]] for kind in kinds])}
        layers = layers_of(names, ["operator"] * len(kinds))
        run = [Measurement(step, layers, values, {"violations": 0.0}, bands=band) for step in (10, 20)]
        figure = page_of(*run).figures["panel-0"]["data"]
        areas = [t["name"] for t in figure if t.get("fill") == "tonexty"]
        legend = [t["name"] for t in figure if t["showlegend"] and t["name"] not in names]
        assert legend == areas
        return areas, [t["name"] for t in figure if t["line"].get("dash") == "dash"]

    assert bands(0, 1) == ([], ["limit of net.0"] * 2 + ["limit of net.1"] * 2)
    assert bands(0) == (["band"], [])
    assert bands(0, 0) == (["band of most layers"], [])
    assert bands(0, 1, 1) == (["band of most layers"], ["limit of net.0"] * 2)
    assert bands(0, 0, 1, 1) == (["band of 2 layers"], ["limit of 2 layers"] * 2)
    assert bands(0, 0, 1, 2) == (["band of 2 layers"], ["limit of net.2"] * 2 + ["limit of net.3"] * 2)


@pytest.mark.parametrize("count", [1, 119, 120, 121, 201, 1000])
@pytest.mark.parametrize("first", [0, 1, 3, 150])
def test_layers_of_which_curves_are_drawn(count, first):
    places = list(range(0, count, 7))[:first]
    found = sampled(range(count), [i in places for i in range(count)])
    assert len(found) == len(set(found)) == min(count, 120)
    assert found == sorted(found)
    assert set(places) <= set(found) or len(places) > 120
    assert {0, count - 1} <= set(found) or len(places) >= 119


@pytest.mark.slow
def test_readouts_and_what_is_outside_are_always_drawn():
    """A readout in the middle of a deep network, where it stands in the order of layers."""
    run = list(deep(1000, 2))
    layers = tuple(replace(info, role="readout") if i == 501 else info for i, info in enumerate(run[0].layers))
    page = page_of(*(replace(m, layers=layers, verdicts=(verdict("blocks.402.b"),)) for m in run))
    assert {layers[501].name, "blocks.402.b"} <= set(page.lines("lr"))


def test_names_beside_pictures_and_in_legends_tell_layers_apart():
    names = [f"model.encoder.layer.{i}.attention.self_attention.query_projection" for i in range(12)]
    values = {key: torch.rand(12) + 0.1 for key in QUANTITIES}
    bands = {"update_natural": torch.tensor([[0.01, 2.0, 0.5]] * 12)}
    outside = tuple(map(verdict, names[3:5]))
    run = [Measurement(step, layers_of(names, ["operator"] * 12), values, {}, outside, bands=bands) for step in (1, 2)]
    page = page_of(*run)
    ticks = [re.sub("<[^>]*>", "", tick) for tick in page.figures["overview-figure"]["layout"]["yaxis"]["ticktext"]]
    assert [int(re.search(r"\d+", tick).group()) for tick in ticks] == list(range(12))
    lines = page.lines("lr")
    assert [lines[name]["name"] for name in names] == ticks
    assert all(lines[name]["meta"][0] == name for name in names)


def test_neighbours_that_are_outside_are_named_as_far_as_there_is_room():
    run = list(deep(400, 2))
    outside = tuple(verdict(info.name) for info in run[-1].layers[100:104])
    page = page_of(run[0], replace(run[1], verdicts=outside))
    axis = page.figures["overview-figure"]["layout"]["yaxis"]
    order = {name: i for i, name in enumerate(axis["categoryarray"])}
    places = [order[name] for name in axis["tickvals"]]
    pixels = 580 / 400
    assert min(b - a for a, b in pairwise(places)) * pixels >= 14
    assert places[-1] == 399
    assert sum("color" in text for text in axis["ticktext"]) == 1

"""Which tests `make test` leaves to `make test-all`."""

from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems


class Item:
    """What the hook asks of a collected test."""

    def __init__(self, name, *marks, path="a.py"):
        self.originalname, self.path, self._marks = name, Path(path), {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self._marks.get(name)

    def add_marker(self, mark):
        self._marks[mark.name] = mark.mark


def slow(*items):
    pytest_collection_modifyitems(list(items))
    return [item.get_closest_marker("slow") is not None for item in items]


def few(n, name="test", count=6, path="a.py"):
    return [Item(name, pytest.mark.few(n).mark, path=path) for _ in range(count)]


@pytest.mark.parametrize(
    ("n", "quick"), [(1, [3]), (2, [1, 4]), (3, [1, 3, 5]), (6, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_a_few_cases_are_quick(n, quick):
    assert [i for i, is_slow in enumerate(slow(*few(n))) if not is_slow] == quick


def test_cases_of_each_test_are_counted_apart():
    found = slow(*few(1, "one", 2), *few(1, "two", 2), *few(1, "two", 2, path="b.py"))
    assert found == [True, False] * 3


def test_of_a_test_that_was_asked_for_by_itself_nothing_is_left_out():
    assert slow(*few(1, count=1)) == [False]


def test_cases_that_are_slow_anyway_are_not_counted():
    slow_ones = [Item("test", pytest.mark.few(1).mark, pytest.mark.slow.mark) for _ in range(4)]
    assert slow(*slow_ones, *few(1, count=1)) == [True] * 4 + [False]


def test_what_is_exhaustive_is_slow():
    assert slow(Item("test", pytest.mark.exhaustive.mark), Item("test")) == [True, False]

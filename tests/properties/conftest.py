"""How many examples a property is tried on: the same few in every run, and many in ``make test-exhaustive``, or with
``--hypothesis-profile=many``.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

for name, examples in (("few", 40), ("many", 600)):
    # No deadline: timings on a shared machine say nothing. No database: an example that fails belongs in a test.
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def pytest_configure(config):
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("few")


settings.load_profile("few")

"""What tests of scorers share."""

import pytest


@pytest.fixture(scope="module")
def scorers(request, tmp_path_factory):
    """A file with the test module's own scorers, its `SCORERS`."""
    path = tmp_path_factory.mktemp("scorers") / "mine.py"
    path.write_text(request.module.SCORERS)
    return path

"""What tests of reward functions share."""

import pytest


@pytest.fixture(scope="module")
def functions_file(request, tmp_path_factory):
    """A file with the test module's own functions_file, its `FUNCTIONS`."""
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(request.module.FUNCTIONS)
    return path

import pytest

from tests.specs import DENSE, draw


@pytest.fixture(scope="session")
def spec():
    return DENSE


@pytest.fixture(scope="session")
def params():
    return draw(DENSE)

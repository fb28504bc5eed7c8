"""What tests say of errors: their type, and the keys and rows that they name, but not their words.

`tests/test_messages.py` keeps the words of some.
"""

import contextlib
from collections.abc import Iterator

import pytest

from jaxrl_llm.config.errors import ConfigError, RowError


@contextlib.contextmanager
def refuses(*keys: str, rows: tuple[int, ...] | None = None) -> Iterator[None]:
    """Expect a ConfigError whose lines begin with these keys, in any order.

    Args:
        keys: of the lines that begin with one; none given: any.
        rows: of a RowError; None: an error of any kind.
    """
    with pytest.raises(ConfigError) as caught:
        yield
    if keys:
        assert sorted(caught.value.keys) == sorted(keys), str(caught.value)
    if rows is not None:
        assert isinstance(caught.value, RowError), repr(caught.value)
        assert caught.value.rows == rows, str(caught.value)

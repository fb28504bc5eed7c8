"""Which annotations name a group of keys."""

from typing import Any, get_args


def group_of(annotation: Any) -> Any:
    """Return the group of keys that an annotation names, `T` or `T | None`, or None.

    >>> group_of(int) is None
    True
    """
    options = (annotation, *get_args(annotation))
    groups = [t for t in options if isinstance(t, type) and hasattr(t, "__pydantic_fields__")]
    return groups[0] if groups else None

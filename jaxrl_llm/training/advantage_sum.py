"""Sums of weighted advantage functions, as of a task's rewards and of a teacher."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.config.fields import asks_for, call, name_of

Function = Callable[..., Any]


class AdvantageSum:
    """The advantage function Σ w_i · A_i, which asks for all that its terms ask for.

    A term that gives advantages and returns gives the sum its returns; one may.

    Args:
        terms: functions, each with its weight.

    Attributes:
        terms: the same.
    """

    def __init__(self, terms: Sequence[tuple[Function, float]]) -> None:
        """Take the fields of all terms as parameters."""
        self.terms = tuple(terms)
        names = dict.fromkeys(name for function, _ in terms for name in asks_for(function))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        self.__name__ = " + ".join(
            name_of(function) if weight == 1 else f"{weight:g} {name_of(function)}"
            for function, weight in terms
        )

    def __call__(self, *values: Any) -> Any:
        """Return the advantages [B] or [B T], or a pair of these and the returns.

        Raises:
            ValueError: two terms have returns.
        """
        fields = dict(zip(inspect.signature(self).parameters, values, strict=True))
        parts, returns = [], []
        for function, weight in self.terms:
            result = call(function, fields)
            advantages, *rest = result if isinstance(result, tuple) else (result,)
            parts.append(weight * advantages)
            returns += rest
        if len(returns) > 1:
            raise ValueError(
                f"{self.__name__}: {len(returns)} of the terms have returns for a critic, "
                "expected one at most"
            )
        per_token = any(part.ndim == 2 for part in parts)
        spread = [part[:, None] if per_token and part.ndim == 1 else part for part in parts]
        total = functools.reduce(lambda a, b: a + b, spread)
        return (total, *returns) if returns else total


def terms_of(function: Function) -> tuple[Function, ...]:
    """Return the terms of a sum, or the function itself."""
    if isinstance(function, AdvantageSum):
        return tuple(term for term, _ in function.terms)
    return (function,)

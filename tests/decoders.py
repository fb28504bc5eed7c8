"""A decoder's functions, called with its parameters and spec."""

from typing import NamedTuple

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import NO_INPUTS, RowInputs


class PackedTokens(NamedTuple):
    """Rows of packed tokens, and what else they have."""

    tokens: object
    positions: object
    segment_ids: object
    inputs: RowInputs = NO_INPUTS


def forward(params, spec, tokens, positions, segment_ids, **options):
    """Return the hidden states [R L D] of packed rows."""
    return Decoder(spec).hidden_states(params, tokens, positions, segment_ids, **options)[0]


def forward_with_router(params, spec, tokens, positions, segment_ids, **options):
    return Decoder(spec).hidden_states(params, tokens, positions, segment_ids, **options)


def forward_rows(params, spec, packed, **options):
    return Decoder(spec).hidden_states(params, *packed[:3], inputs=packed.inputs, **options)


def logits(params, spec, hidden):
    return Decoder(spec).logits(params, hidden)


def head_matrix(params, spec, layout=None):
    return Decoder(spec).head_matrix(params, layout)


def extend(params, spec, cache, tokens, positions, **options):
    return Decoder(spec).extend(params, cache, tokens, positions, **options)

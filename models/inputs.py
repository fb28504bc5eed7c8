"""What a pass over rows of tokens is given."""

from typing import NamedTuple

from jaxtyping import Array, Int

from jaxrl_llm.models.vision.inputs import VisualTokens


class RowInputs(NamedTuple):
    """What a model may be given of rows of tokens beside the tokens.

    Attributes:
        routes: Experts that tokens go to in each layer that has some, as for
            `models.moe.routing.replay_routes`; None: routers choose.
        visual: Features that stand in place of the embeddings of some tokens; None: of none.
        rotary: Time, height and width of each token, for a model with `mrope_sections`; None: all
            three are its position.
    """

    routes: Int[Array, "R L M top"] | None = None
    visual: VisualTokens | None = None
    rotary: Int[Array, "R L 3"] | None = None


NO_INPUTS = RowInputs()


class PackedTokens(NamedTuple):
    """Rows of packed tokens.

    Attributes:
        tokens: Token ids.
        positions: Index of each token within its own sequence.
        segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
        inputs: What else the rows have.
    """

    tokens: Int[Array, "R L"]
    positions: Int[Array, "R L"]
    segment_ids: Int[Array, "R L"]
    inputs: RowInputs = NO_INPUTS

"""Models as free functions over array trees."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.models.arrays import ArrayDecl
    from jaxrl_llm.models.decoder import Decoder
    from jaxrl_llm.models.hf.config import read_spec
    from jaxrl_llm.models.hf.load import load_params
    from jaxrl_llm.models.hf.save import save_params
    from jaxrl_llm.models.model import Model
    from jaxrl_llm.models.parameters import declare, init_params, parameter_count
    from jaxrl_llm.models.spec import LoraSpec, ModelSpec

attach(__name__)

"""The keys and rules that training and SFT share."""

from typing import Any

from jaxrl_llm.config.checks import above_zero, at_least, require
from jaxrl_llm.config.sections.mesh import check_mesh
from jaxrl_llm.config.sections.model import check_adapter, check_dtype
from jaxrl_llm.config.sections.optim import check_clip
from jaxrl_llm.models.remat import POLICIES

STALL_TIMEOUT = (
    "seconds without a step until the run counts as hung: stacks are printed and it ends, on a "
    "cluster it is started again; the first step has to fit, with loading; null never"
)
COMPILATION_CACHE = (
    "keep compiled programs in run_dir/cache/compilation, for when the run is continued; another "
    "folder that JAX_COMPILATION_CACHE_DIR names is used in any case"
)


def check_shared(config: Any) -> None:
    """Refuse contradictions in the groups that training and SFT share."""
    at_least(config, 1, "steps epochs model.logprob_chunk checkpoint.keep")
    at_least(config, 0, "seed checkpoint.every optim.max_skipped")
    at_least(config, 0, "model.router_loss_coef model.router_bias_rate")
    above_zero(config, "stall_timeout_s checkpoint.grace_s")
    require(config.seed < 2**32, f"seed={config.seed}, wanted a number below 2**32")
    require(len(config.data.train) > 0, "data.train names no file")
    check_dtype("model.dtype", config.model.dtype)
    check_adapter(config.model)
    require(
        config.model.remat in POLICIES,
        f"model.remat={config.model.remat!r}, wanted one of {', '.join(POLICIES)}",
    )
    require(
        config.model.attention in ("auto", "xla", "cudnn"),
        f"model.attention={config.model.attention!r}, wanted auto, xla or cudnn",
    )
    require(
        config.checkpoint.resume in ("auto", "never"),
        f"checkpoint.resume={config.checkpoint.resume!r}, wanted auto or never",
    )
    check_clip("optim.grad_clip", config.optim.grad_clip)
    for step in config.log.profile_steps:
        require(
            step >= 1 and (config.steps is None or step <= config.steps),
            f"log.profile_steps={list(config.log.profile_steps)}, but {step} is not a step of the "
            f"run: wanted numbers from 1 to {config.steps or 'the last step'}",
        )
    check_mesh(config.mesh)

"""What worker processes may take, and which environment variables they are given."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

PASSED_VARIABLES = """
    PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE LC_* TZ TMPDIR TEMP TMP XDG_*
    VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV LD_LIBRARY_PATH LD_PRELOAD DYLD_*
    PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONWARNINGS
    PYTHONNOUSERSITE PYTHONUSERBASE PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
    PYTHONUNBUFFERED PYTHONFAULTHANDLER PYTHONMALLOC
    OMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* VECLIB_* MALLOC_* TOKENIZERS_PARALLELISM
    CUDA_VISIBLE_DEVICES CUDA_HOME JAX_PLATFORMS XLA_*
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_ENDPOINT HF_HUB_OFFLINE HF_DATASETS_OFFLINE
    TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE NLTK_DATA TIKTOKEN_CACHE_DIR
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
"""Names (`*` stands for any letters) of the variables that every worker gets. None of them usually
holds a secret, which a proxy's address may."""


class Limits(NamedTuple):
    """What each worker process may take.

    Args:
        memory_gb: GB of memory of each process; None sets no limit.
        max_processes: processes that a user's function may have started at once; None sets no
            limit.
        pass_env: names of environment variables that it gets beside `PASSED_VARIABLES`; `*` stands
            for any letters.
    """

    memory_gb: int | float | None = 4.0
    max_processes: int | None = 64
    pass_env: tuple[str, ...] = ()


DEFAULT_LIMITS = Limits()
MAX_LINE_BYTES = 64_000_000  # of an answer of a worker, with all that it holds


def passed_environment(environment: Mapping[str, str], more: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that a worker gets: `PASSED_VARIABLES`, and those of a config.

    >>> passed_environment({"LC_ALL": "C", "HF_TOKEN": "x", "MY_URL": "y"}, ("MY_*",))
    {'LC_ALL': 'C', 'MY_URL': 'y'}
    """
    patterns = (*PASSED_VARIABLES.split(), *more)
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }

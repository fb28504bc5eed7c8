"""The keys of a config, a class for each of its sections.

Every key has its type, its bounds, its default and what it means. `programs` has the whole configs.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, closest
from jaxrl_llm.workers.values import finite_number

Item = TypeVar("Item")

# The types of config keys, and how a group of keys is declared.
#
# A group is a frozen dataclass of pydantic's; the text below a key says what it is for. Types are
# strict: YAML's `yes` or a quoted "3" is no number. An int is taken for a float.


STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)


class _ConfigErrors(type):
    """The type of groups: what pydantic refuses when one is made is a ConfigError."""

    def __call__(cls, *args: Any, **kwargs: Any):  # the result's type is the class's
        """Make a group."""
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError(*violations(cls, error)) from None


@functools.cache
def texts_below_keys(module: str) -> dict[str, dict[str, str]]:
    """Return the texts that stand below the keys of a module's classes, by class and key."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # there is no source, as of a class in a shell
        return {}
    return {
        group.name: {
            ast.unparse(key.target if isinstance(key, ast.AnnAssign) else key.targets[0]): " ".join(
                text.value.value.split()
            )
            for key, text in itertools.pairwise(group.body)
            if isinstance(key, ast.AnnAssign | ast.Assign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for group in tree.body
        if isinstance(group, ast.ClassDef)
    }


class Section(metaclass=_ConfigErrors):
    """The base of all groups of keys, whole configs included.

    Raises:
        ConfigError: a line for each value that is wrong; if there is none, for each contradiction.
    """

    __pydantic_fields__: ClassVar[dict[str, FieldInfo]]

    def __init_subclass__(cls) -> None:
        """Give each key the text below it as its description."""
        for name, text in texts_below_keys(cls.__module__).get(cls.__name__, {}).items():
            annotated = Annotated[cls.__annotations__[name], Field(description=text)]
            cls.__annotations__[name] = annotated

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let a mapping stand for a group, which strict types would refuse."""
        schema = handler(source)
        inner = handler.resolve_ref_schema(schema)
        while inner["type"] != "dataclass":
            inner = inner["schema"]
        inner["strict"] = False
        return schema


def function_key(
    home: str,
    default: FunctionSpec | tuple[FunctionSpec, ...] | str | None,
    *,
    passed: tuple[str, ...] | None = None,
    several: bool = False,
) -> Any:
    """Declare a key that names a function.

    Args:
        home: module in which a bare name is looked up.
        default: the function, by name or with keywords; several where the key is a list.
        passed: parameters that a config may not set; None where they are the positional ones
            without a default.
        several: whether a list may stand in the place of one, as for `OneOrMore`.
    """
    spec = FunctionSpec(default) if isinstance(default, str) else default
    home_of_names = {"home": home, "passed": passed and list(passed), "several": several}
    return Field(spec, json_schema_extra={"function": home_of_names})


def _as_spec(value: Any) -> Any:
    if isinstance(value, tuple) and callable(getattr(value, "update", None)):  # optax is slow
        raise PydanticCustomError(
            "optax_transformation",
            "a function of the learning rate, as in "
            "lambda learning_rate: optax.adamw(learning_rate)",
        )
    if callable(value):
        return FunctionSpec.of(value)
    if isinstance(value, str):
        return FunctionSpec(value)
    if isinstance(value, Mapping) and "fn" in value:
        keywords = {str(k): v for k, v in value.items() if k != "fn"}
        if callable(value["fn"]):
            spec = FunctionSpec.of(value["fn"])
            return dataclasses.replace(spec, kwargs={**spec.kwargs, **keywords})
        if isinstance(value["fn"], str):
            return FunctionSpec(value["fn"], keywords)
    return value


def _one_or_more(value: Any) -> FunctionSpec | tuple[FunctionSpec, ...]:
    specs = [_as_spec(item) for item in value] if isinstance(value, list | tuple) else None
    result = _as_spec(value) if specs is None else tuple(specs)
    for spec in (result,) if specs is None else specs or (None,):
        if not isinstance(spec, FunctionSpec):
            raise PydanticCustomError(
                "functions", "a function's name, {fn: NAME, keyword: …}, or a list of such"
            )
    return result


def _one_or_more_as_config(value: FunctionSpec | tuple[FunctionSpec, ...]) -> Any:
    return [s.as_config() for s in value] if isinstance(value, tuple) else value.as_config()


def _text_or_texts(value: Any) -> str | dict[str, str]:
    texts = list(value.values()) if isinstance(value, Mapping) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("texts", "a text, or a mapping from data_source to texts")
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _with_text_keys(value: Any) -> Any:
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value


def _no_nan(value: float) -> float:
    if value != value:
        raise PydanticCustomError("float_type", "NaN is no setting")
    return value


Number = Annotated[float, AfterValidator(_no_nan)]
"""A float that is no NaN."""

Function = Annotated[
    InstanceOf[FunctionSpec], BeforeValidator(_as_spec), PlainSerializer(FunctionSpec.as_config)
]
"""A function's name, or `{fn: NAME, keyword: value, …}`."""

OneOrMore = Annotated[
    FunctionSpec | tuple[FunctionSpec, ...],
    PlainValidator(_one_or_more),
    PlainSerializer(_one_or_more_as_config),
]
"""A function as above, or a list of such."""

PerSource = Annotated[
    str | dict[str, str],
    PlainValidator(_text_or_texts, json_schema_input_type=str | dict[str, str]),
]
"""A text, or one for each data_source."""

Several = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]
"""A list; one item may stand for a list of one."""

Table = Annotated[dict[str, Any], BeforeValidator(_with_text_keys)]
"""A mapping whose keys are not ours."""


def group_of(annotation: Any) -> Any:
    """Return the group of keys that an annotation names, `T` or `T | None`, or None.

    >>> group_of(int) is None
    True
    """
    options = (annotation, *get_args(annotation))
    groups = [t for t in options if isinstance(t, type) and hasattr(t, "__pydantic_fields__")]
    return groups[0] if groups else None


# What pydantic finds wrong with a config, as lines that name the key, the value and the fix.


EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a group of keys",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "is_instance_of": "a function's name or {fn: NAME, keyword: …}",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "too_short": "at least one",
}
"""What is expected, by pydantic's name of the error."""

BOUNDS = {
    "greater_than": "a number above {gt:.15g}",
    "greater_than_equal": "{ge:.15g} or more",
    "less_than": "a number below {lt:.15g}",
    "less_than_equal": "{le:.15g} or less",
}


LONGEST = 120
"""Of a value that a message shows, in characters."""


def violations(cls: type[Any], error: ValidationError, prefix: str = "") -> list[str]:
    """Return a line for each thing that is wrong.

    Args:
        cls: of the config.
        error: as pydantic raised it.
        prefix: of the keys' names, with a dot.
    """
    return [line for item in error.errors() for line in _lines(cls, dict(item), prefix)]


def _lines(cls: type[Any], error: Mapping[str, Any], prefix: str) -> list[str]:
    path = [str(part) for part in error["loc"] if not isinstance(part, int)]
    name, kind = prefix + ".".join(path), error["type"]
    if kind == "value_error":  # of rules
        return [f"{name}: {line}" if name else line for line in error["ctx"]["error"].args]
    group = _group(cls, path[:-1])
    field = group.__pydantic_fields__.get(path[-1])
    if kind == "unexpected_keyword_argument" or field is None:
        return [f"unknown key {name!r}; {closest(path[-1], group.__pydantic_fields__)}"]
    if kind == "missing":
        return [f"{name} is missing: {field.description}"]
    return [f"{name}: expected {_expected(error, field.annotation)}, got {_shown(error['input'])}"]


def _group(cls: type[Any], path: list[str]) -> type[Any]:
    for name in path:
        cls = group_of(cls.__pydantic_fields__[name].annotation) or cls
    return cls


def _expected(error: Mapping[str, Any], annotation: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        expected = context["expected"].replace("'", "")
    elif kind in BOUNDS:
        expected = BOUNDS[kind].format(**context)
    else:
        expected = EXPECTED.get(kind) or error["msg"]
    return f"{expected}, or null" if type(None) in get_args(annotation) else expected


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text, kind = repr(value), type(value).__name__
    return f"{text} ({kind})" if len(text) <= LONGEST else f"a {kind}"


Config = TypeVar("Config", bound=Section)


# The sections of configs.


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig(Section):
    """A low-rank adapter, trained while the model's own weights are frozen."""

    rank: int = Field(default=16, ge=1)
    """r: inner width of the adapter"""
    alpha: Number = Field(default=32.0, gt=0)
    """the adapter's output is scaled by alpha / rank"""
    targets: Several[str] = Field(default=("all-linear",), min_length=1)
    """adapted matrices: all-linear, or names or patterns such as q_proj, *_proj"""
    rslora: bool = False
    """scale by alpha / sqrt(rank) instead"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig(Section):
    """The policy's model."""

    path: str
    """Hugging Face directory: config.json, safetensors, tokenizer"""
    function: Function | None = function_key(functions.MODELS, None, passed=("rngs", "vocab_size"))
    """function that returns your own model (docs/own_models.md); model.path then holds its
    tokenizer, and its safetensors unless random_init"""
    vision: Literal["none", "frozen", "trained"] = "none"
    """the tower that reads images and videos: none (text only; prompts with images are refused),
    frozen (it reads them, and stays as it is) or trained"""
    random_init: bool = False
    """initialise the weights at random; the directory then needs none"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """compute dtype, float32 or bfloat16; master weights are float32"""
    remat: Literal["none", "dots", "full"] = "none"
    """activation checkpointing: none (store all), dots (store products) or full (store each layer's
    input)"""
    logprob_chunk: int = Field(default=1024, ge=1)
    """tokens of a device whose logits are in memory at once"""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """attention kernel in training: xla, cudnn (Hopper GPUs and later), or auto, which takes cudnn
    if it is possible and agrees with xla; the native engine reads pages of its cache in place
    where it can, unless it is xla"""
    experts: Literal["auto", "xla", "triton"] = "auto"
    """what multiplies rows of experts: xla, triton (Ampere GPUs and later, bfloat16), or auto,
    which takes triton if it is possible and agrees with xla"""
    router_loss_coef: Number = Field(default=0.0, ge=0)
    """weight of the load-balance loss of a mixture of experts, 0.001 in many families; it takes one
    more forward pass in each update"""
    router_bias_rate: Number = Field(default=0.001, ge=0)
    """step by which each update moves the bias of sigmoid routers against the load; 0 freezes it"""
    lora: LoraConfig | None = None
    """train a low-rank adapter {rank: 16, alpha: 32, targets: all-linear, rslora: false} over the
    frozen model; null trains every weight"""
    adapter: str | None = None
    """directory of an adapter in PEFT's format to continue from, instead of a new one"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyConfig(ModelConfig):
    """The policy's model in RL."""

    warm_start: str | None = None
    """config for jaxrl_llm.sft that makes model.path when there is nothing there"""
    router_replay: Literal["none", "rollout", "old_policy"] = "none"
    """experts that tokens go to in the update of a mixture of experts: none, those that its router
    chooses; rollout, those that the engine's has chosen (R3), also for the old log-probs;
    old_policy, those of the pass for the old log-probs (R2)"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RowsConfig(Section):
    """Files of rows that a run trains on."""

    train: Several[str] = Field(min_length=1)
    """parquet or jsonl files"""
    prepare: Function | None = function_key(functions.PREPARATIONS, None, passed=())
    """preparation that writes the files when they are missing (jaxrl_llm.data.prepare)"""
    filter_overlong: bool = False
    """drop rows that are too long; false makes them an error"""
    shuffle: bool = True
    """shuffle in every epoch, by the seed"""
    chat_template_kwargs: Table = Field(default={})
    """keywords for the chat template"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VisualKeys(Section):
    """How rows name images and videos, and how large these are for the model."""

    image_key: str = "images"
    """column of the images of a prompt (docs/images.md)"""
    video_key: str = "videos"
    """column of the videos of a prompt"""
    max_pixels: int | None = Field(default=None, ge=1)
    """the largest area of an image, and of a frame of a video, to which it is resized; null takes
    the model's"""
    min_pixels: int | None = Field(default=None, ge=1)
    """the smallest area of an image; null takes the model's"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig(VisualKeys, RowsConfig):  # the keys of the last come first
    """Prompts to train and validate on."""

    train: Several[str] = Field(min_length=1)
    """parquet or jsonl files with verl's columns"""
    validation: Several[str] = ()
    """held-out files of the same kind"""
    dataset: Function = function_key(functions.DATASETS, "verl_rows")
    """function from files to rows"""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """the longest prompt, in tokens of the chat template's text, with those of images"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftDataConfig(VisualKeys, RowsConfig):
    """Examples to imitate."""

    train: Several[str] = Field(min_length=1)
    """parquet or jsonl files with a column messages, or with prompt and response"""
    dataset: Function = function_key(functions.DATASETS, "sft_rows")
    """function from files to rows"""
    max_tokens: int = Field(default=1024, ge=1)
    """the longest example, prompt and response"""
    train_on: Literal["all", "last"] = "all"
    """answers of a conversation that are trained: all, or the last one"""


def _as_score(value: Any) -> Any:
    number = None if isinstance(value, bool) else finite_number(value)
    if value != "unscored" and number is None:
        raise PydanticCustomError("score_type", "a finite number or unscored")
    return value if number is None else number


ErrorScore = Annotated[
    float | Literal["unscored"],
    PlainValidator(_as_score, json_schema_input_type=float | Literal["unscored"]),
]
"""A score, or that there is none. One validator for both: a union would have errors for each."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProcessConfig(Section):
    """What bounds the processes in which functions of the user's run."""

    memory_gb: Number | None = Field(default=4.0, gt=0, allow_inf_nan=False)
    """GB of memory of each process; null sets no limit"""
    max_processes: int | None = Field(default=64, gt=0)
    """processes that one of them may have started at once; null sets no limit"""
    pass_env: Several[str] = ()
    """environment variables that they see besides the usual ones, such as OPENAI_API_KEY; * stands
    for any letters"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScoringConfig(ProcessConfig):
    """The processes in which a reward function runs."""

    workers: int = Field(default=2, ge=0)
    """scoring processes; 0 scores in this process, without a time limit"""
    timeout_s: Number = Field(default=10.0, gt=0, allow_inf_nan=False)
    """seconds for one response; of an async function, for each try"""
    concurrency: int = Field(default=16, ge=1)
    """calls of an async reward function at once, in the whole run"""
    retries: int = Field(default=3, ge=0)
    """how often a call of an async reward function is tried again after HTTP 408, 425, 429 or 500
    and above, a lost connection or timeout_s"""
    on_error: ErrorScore | None = 0.0
    """score of a response whose reward function raises or hangs, or whose score is not finite;
    unscored leaves the response out, null stops the run"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig(ScoringConfig):
    """How answers are scored."""

    classifier: str | None = None
    """Hugging Face directory of a reward model, which scores prompt and response: a sequence
    classifier with one label, or a process reward model; null: reward.function's score"""
    render: Literal["auto", "ids", "answer", "chat"] = "auto"
    """what reward.classifier reads. ids: the policy's tokens; answer: text by its own tokenizer,
    the templated prompt, the response and the end token, as jaxrl_llm.prefer trains it; chat:
    the whole chat by its own template; auto: ids where the tokenizers are the same, else answer
    for a model of jaxrl_llm.prefer and chat for another"""
    chat_template_kwargs: Table = Field(default={})
    """keywords for reward.classifier's chat template"""
    max_tokens: int | None = Field(default=None, ge=1)
    """the longest prompt and response in tokens of reward.classifier, where it reads text; longer
    ones score reward.on_error; null: twice what the policy's tokens may be, or what
    reward.classifier and batch.max_tokens_per_device hold"""
    step_separator: str | None = Field(default=None, min_length=1)
    """text that ends a step of a response, for a process reward model; null: the one that it was
    trained with"""
    aggregate: Literal["min", "product", "last", "mean"] = "min"
    """a response's score from its steps' scores, of a process reward model"""
    step_rewards: bool = False
    """each step's score is the reward of its last token, in place of the response's score on the
    last one, with a process reward model"""

    function: Function | None = function_key(functions.REWARD_FUNCTIONS, "by_source")
    """reward function (data_source, solution_str, ground_truth, extra_info) -> float or dict;
    null if reward.classifier alone scores"""
    max_error_share: Number = Field(default=0.5, ge=0, le=1)
    """stop when a reward function fails on, or leaves unscored, more than this share of the
    responses that are scored together, or of the newest 16 if those are fewer; 1 never stops"""
    components: Several[str] = ()
    """numbers in the reward function's dict that are the field score_components, in this order"""

    def __post_init__(self) -> None:
        """Refuse keys of a reward model where there is none."""
        names = "render", "chat_template_kwargs", "max_tokens", "step_separator", "aggregate"
        lines = [
            f"{name} is set, but reward.classifier names no reward model"
            for name in (*names, "step_rewards")
            if getattr(self, name) != RewardConfig.__pydantic_fields__[name].default
        ]
        if lines and self.classifier is None:
            raise ConfigError(*lines)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateRewardConfig(ScoringConfig):
    """How answers are scored in an evaluation."""

    function: Function = function_key(functions.REWARD_FUNCTIONS, "by_source")
    """reward function (data_source, solution_str, ground_truth, extra_info) -> float or dict"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EpisodeLimitsConfig(Section):
    """What bounds one episode."""

    turns: int = Field(default=8, ge=1)
    """turns that the policy draws at most"""
    turn_tokens: int | None = Field(default=None, ge=1)
    """tokens of one turn; null: as many as are left"""
    observation_tokens: int = Field(default=512, ge=4)
    """tokens that a tool or an environment may say at once; the middle of a longer text is left
    out"""
    parallel_calls: int = Field(default=4, ge=1)
    """calls of tools in one turn; further ones get an error"""
    timeout_s: Number | None = Field(default=None, gt=0)
    """seconds for a whole episode, which then ends with what it has; null: no limit"""
    broken_share: Number = Field(default=0.5, ge=0, le=1)
    """stop when more than this share of the episodes sampled together are broken, for no fault of
    the policy's; 1 never stops as long as one is not"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToolProcessConfig(ProcessConfig):
    """The processes in which tools and environments run."""

    workers: int = Field(default=2, ge=0)
    """processes; 0 runs tools in this process, without a time limit"""
    timeout_s: Number = Field(default=10.0, gt=0, allow_inf_nan=False)
    """seconds for one call, or one step of an environment"""
    retries: int = Field(default=2, ge=0)
    """new attempts at a call whose infrastructure failed (BrokenTool)"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AgentConfig(Section):
    """Who leads an episode, and what the policy may use in it."""

    agent: Function | None = function_key(functions.AGENTS, None)
    """coroutine that leads an episode; null: with_environment or with_tools where there are
    such, else one_answer"""
    tools: Several[Function] = Field(
        default=(), json_schema_extra={"function": {"home": functions.TOOLS, "passed": None}}
    )
    """functions that the policy may call; their signatures tell it how"""
    environment: Function | None = function_key(functions.ENVIRONMENTS, None)
    """generator function to which the policy's turns are told"""
    call_format: str | None = None
    """how the model writes calls of tools: hermes, qwen3_coder, llama3_json, pythonic, mistral,
    deepseek or harmony; null: as its chat template does"""
    order: Literal["lockstep", "free"] = "lockstep"
    """lockstep samples the turns of all episodes in rounds, with the same result bit for bit
    whatever time tools take; free samples each turn at once, for scale"""
    limits: EpisodeLimitsConfig = Field(default_factory=EpisodeLimitsConfig)
    tool_process: ToolProcessConfig = Field(default_factory=ToolProcessConfig)

    @property
    def has_episodes(self) -> bool:
        """Return whether there is anything but plain answers."""
        return bool(self.agent or self.tools or self.environment)


def episodes_have_one_process(
    config: AgentConfig, processes: int, prefix: str = ""
) -> Iterator[str]:
    """Refuse several processes that sample, of which each would run the tools."""
    if config.has_episodes and processes > 1:
        given = [name for name in ("agent", "tools", "environment") if getattr(config, name)]
        yield (
            f"{prefix}{given[0]} needs one process, got {processes}, of which each would run it: "
            "start one"
        )


CACHE_GB = (
    "GB of each device for the KV cache at most; null is enough if all "
    "running sequences have the longest length"
)

TOLERANCE, FP8_TOLERANCE, CACHE_TOLERANCE = 0.05, 0.4, 0.1
"""Mean differences of log-probs, in nats, at which a run stops: by default, with fp8 matrices, and
with low precision in the cache, where int8 made 0.026 (docs/performance.md)."""

KV_CACHE_DTYPES = {"native": ("auto", "int8"), "vllm": ("auto", "fp8")}
"""Of keys and values, by engine."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VllmConfig(Section):
    """The vLLM sidecars, where rollout.engine is vllm."""

    python: str | None = None
    """interpreter that has vLLM; null takes the one of jaxrl_llm.rollout.vllm.setup"""
    sidecars: int = Field(default=1, ge=1)
    """processes, each with a copy of the model"""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share a copy; on CPUs, processes"""
    first_device: int | None = Field(default=None, ge=0)
    """the first GPU of the first sidecar, the others follow; counted among CUDA_VISIBLE_DEVICES of
    `env`, else the trainer's; null: 0 for several sidecars without `launch`, else all see all"""
    sleep: bool = False
    """free the GPUs' memory between rollouts, if training shares them"""
    start_timeout_s: Number = Field(default=600.0, gt=0)
    """seconds for a sidecar to be ready"""
    timeout_s: Number = Field(default=120.0, gt=0)
    """seconds without a message or a token until a sidecar counts as hung"""
    restarts: int = Field(default=3, ge=0)
    """restarts of a sidecar before the run stops"""
    launch: Several[str] = ()
    """command prefix of each sidecar, or one for all, as in [ssh node2]"""
    host: str = "127.0.0.1"
    """address at which sidecars find the trainer"""
    env: Table = Field(default={})
    """environment variables for the sidecars"""
    engine_args: Table = Field(default={})
    """more keywords of vLLM's AsyncEngineArgs"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingConfig(Section):
    """The engine of a run, and how it samples."""

    engine: Literal["native", "vllm"] = "native"
    """native, in this process, or vllm, in sidecars"""
    samples_per_prompt: int = Field(default=8, ge=1)
    """G: responses sampled for each prompt"""
    max_new_tokens: int = Field(default=512, ge=1)
    """largest number of tokens of a response; of an episode, all after its prompt"""
    temperature: Number = Field(default=1.0, gt=0)
    """softmax temperature, in the engine and in the trainer's log-probs"""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """nucleus: sample from the smallest set with this mass"""
    top_k: int = Field(default=0, ge=0)
    """sample from the k most likely tokens; 0 means all"""
    max_running_sequences: int = Field(default=256, ge=1)
    """sequences that the engine decodes at once"""
    kv_cache_gb: Number | None = Field(default=None, gt=0, description=CACHE_GB)
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """of keys and values: auto, that of the engine; int8 with a scale for each token and head
    (native) or vLLM's fp8 hold about twice the tokens of bfloat16"""
    quantization: Literal["none", "fp8"] = "none"
    """of the engine's matrices: none, or fp8, in which both engines hold half of the bytes of
    bfloat16 and multiply by float8 tensor cores"""
    logprob_tolerance: Number | None = Field(
        default=None,
        description=(
            "largest mean difference of the engine's and the trainer's log-probs; above it the "
            f"run stops; null: {TOLERANCE}, or {FP8_TOLERANCE} with quantization: fp8, or "
            f"{CACHE_TOLERANCE} with int8 or fp8 in the cache"
        ),
    )
    dump_every: int = Field(default=0, ge=0)
    """write the rollouts of every n-th step to parquet; those of the first and the last step are
    always kept, with 0 these alone"""
    staleness: int = Field(default=0, ge=0)
    """K: answers may be begun K steps before the one that trains on them, so that later prompts
    fill the places that the longest answers leave empty; no token is more than K updates old"""
    at_push: Literal["reread", "keep", "finish"] = "reread"
    """what becomes of answers in flight when new weights are pushed: reread, they go on under
    these, after their tokens are read again; keep, they do so with the keys and values that the
    weights before have computed; finish, they end before the push"""
    turns: int | None = Field(default=None, ge=0)
    """of an engine with devices of its own: turns that it takes while a step is trained, so that no
    time decides what is drawn; null: as many as it can"""
    schedule: str | None = None
    """schedule.jsonl of a run with staleness, which is replayed; null: none"""
    nodes: int = Field(default=0, ge=0)
    """nodes of the cluster that only sample, each with an engine; 0 samples where it trains"""
    devices: int | None = Field(default=None, ge=1)
    """devices of each of these engines; null: the node's GPUs"""
    vllm: VllmConfig = Field(default_factory=VllmConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig(AgentConfig, SamplingConfig):  # the keys of the last come first
    """How the policy is sampled."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig(Section):
    """What is optimised. Each function's keyword arguments are its keys."""

    advantage: OneOrMore = function_key(functions.ADVANTAGES, "grpo", several=True)
    """function in algorithms.advantages; of a list the sum, each times its keyword `weight` (1)"""
    loss: Function | None = function_key(functions.LOSSES, "ppo_clip")
    """function in algorithms.losses; null, where distillation is all that is learned"""
    reduce: Function = function_key(functions.REDUCTIONS, "token_mean")
    """function in algorithms.reduce"""
    kl_loss: Function | None = function_key(functions.KLS, None)
    """KL to the reference in the loss: algorithms.kl"""
    kl_reward: Function | None = function_key(functions.KLS, None)
    """KL to the reference in the reward: algorithms.kl"""
    kl_coef: Number = Field(default=0.001, ge=0)
    """weight of the KL term"""
    kl_controller: Function = function_key(functions.KLS, "fixed")
    """how kl_coef changes from step to step: algorithms.kl"""
    distillation: Function | None = function_key(functions.DIVERGENCES, None)
    """divergence from the teacher in the loss, over the whole vocabulary or the tokens of
    teacher.top_k: algorithms.divergences"""
    distillation_coef: Number = Field(default=1.0, gt=0)
    """weight of the divergence from the teacher"""
    entropy_coef: Number = 0.0
    """weight of the entropy bonus"""
    correction: Several[Function] | None = function_key(functions.CORRECTIONS, None)
    """functions in algorithms.correction, whose importance weights multiply the loss; null:
    truncated_token with vLLM and with an engine in low precision, else none"""
    use_rollout_logprobs: bool = False
    """use the engine's log-probs as old log-probs, without a forward pass of the trainer"""
    high_covariance: Function | None = function_key(functions.LOSSES, None)
    """function that selects tokens for clip_cov and kl_cov: select_clip_cov, select_kl_cov"""
    penalty: Function | None = function_key(functions.SHAPING, None)
    """function in algorithms.shaping; its result [B] is added to the scores"""
    group_filter: Function | None = function_key(functions.SHAPING, None)
    """function in algorithms.shaping that keeps groups to train on; more prompts are sampled in
    place of dropped ones"""
    answer_filter: Function | None = function_key(functions.SHAPING, None)
    """function in algorithms.shaping that keeps answers [B] to update the policy on; advantages
    are of whole groups nevertheless"""
    pairs: Function | None = function_key(functions.PAIRS, None)
    """function in algorithms.pairs that makes pairs of the scored answers; a loss of pairs then
    takes the place of advantage and loss"""
    pair_loss: Function | None = function_key(functions.PREFERENCES, None)
    """loss of these pairs: a function in algorithms.preferences"""
    max_generation_batches: int = Field(default=10, ge=1)
    """batches of prompts that a step may take from at most: it stops when the group filter has
    refused more groups than all but one of them hold, or when answer_filter or pairs have left
    nothing in so many steps in a row"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReferenceConfig(Section):
    """The reference, which is the policy as the run begins with it until it is refreshed."""

    refresh_every: int | None = Field(default=None, ge=1)
    """every so many steps the reference becomes the policy as it is after the step; null: never"""
    mix: Number = Field(default=1.0, gt=0, le=1)
    """share of the policy in a refreshed reference, the rest is the one before; 1 copies the
    policy"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig(Section):
    """The optimizer."""

    optimizer: Function = function_key(functions.OPTIMIZERS, "adamw", passed=("learning_rate",))
    """optax optimizer; mu_dtype: bfloat16 is a keyword of adamw's that halves its first moment"""
    schedule: Function = function_key(
        functions.SCHEDULES, FunctionSpec("constant_schedule", {"value": 1e-6}), passed=()
    )
    """optax schedule: learning rate by update"""
    grad_clip: Number | None = Field(default=1.0, gt=0)
    """largest global gradient norm; null does not clip"""
    max_skipped: int = Field(default=3, ge=0)
    """stop when more updates in a row had a non-finite gradient and were skipped"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticConfig(Section):
    """The critic, where a function asks for values or returns."""

    path: str | None = None
    """Hugging Face directory, with a value head or without; null takes model.path"""
    loss: Function = function_key(functions.VALUES, "clipped_value_loss")
    """function in algorithms.values"""
    reduce: Function = function_key(functions.REDUCTIONS, "token_mean")
    """function in algorithms.reduce"""
    warmup_steps: int = Field(default=0, ge=0)
    """steps in which the critic alone is updated"""
    optim: OptimConfig = Field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImplicitRewardModelConfig(Section):
    """The implicit reward model, where a function asks for reward_logprobs."""

    path: str | None = None
    """Hugging Face directory; null takes model.path"""
    loss: Function = function_key(functions.VALUES, "implicit_reward_loss")
    """function in algorithms.values"""
    reduce: Function = function_key(functions.REDUCTIONS, "sequence_mean_token_mean")
    """function in algorithms.reduce"""
    optim: OptimConfig = Field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig(Section):
    """The models that the policy learns from, where a function asks for teacher_logprobs.

    They are also asked for by algorithm.distillation.
    """

    path: PerSource | None = None
    """Hugging Face directory or hub id of a model with the policy's tokenizer; or one for each
    data_source, {math: DIRECTORY, code: DIRECTORY}"""
    weights: Literal["given", "initial", "live", "ema"] = "given"
    """given: of path; else the policy's own: initial as at the start of the run, live as it is, ema
    their exponential moving average"""
    ema: Number = Field(default=0.05, gt=0, lt=1)
    """share of the policy's weights that the moving average takes over in each step"""
    prompt: Function | None = function_key(functions.TEACHER_PROMPTS, None)
    """function in data.teacher_prompts: the prompt that the teacher reads before an answer;
    null: the policy's"""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """longest prompt of teacher.prompt: an answer with a longer one has no teacher; null:
    data.max_prompt_tokens"""
    url: PerSource | None = None
    """in place of path: API of a server that scores the answers, as http://HOST:8000/v1 of `vllm
    serve` or jaxrl_llm.serve; or one for each data_source"""
    model: PerSource | None = None
    """the teacher's name on the server of url; null: the only one that it has"""
    tokenizer: PerSource | None = None
    """Hugging Face directory with the teacher's own tokenizer and chat template: answers are
    compared over their texts then; null: it has the policy's tokens"""
    chat_template_kwargs: Table = Field(default={})
    """variables of the chat template of tokenizer"""
    max_tokens: int | None = Field(default=None, ge=2)
    """longest sequence of a teacher with a tokenizer of its own, in its tokens; null: twice the
    policy's, or what it takes"""
    api_key: str | None = Field(default=None, min_length=1)
    """sent to url; null takes JAXRL_LLM_TEACHER_API_KEY of the environment, if set"""
    concurrency: int = Field(default=32, ge=1)
    """requests to url at once"""
    timeout_s: Number = Field(default=120.0, gt=0)
    """seconds for an answer of url"""
    retries: int = Field(default=4, ge=0)
    """further tries of a request that url refuses for now or loses"""
    top_k: int | None = Field(default=None, ge=1)
    """likeliest tokens of which a teacher gives the log-probs, for algorithm.distillation or a
    function that asks for teacher_top_logprobs; null: distillation compares the whole
    vocabulary, where the policy is trained"""


VISUAL_TOKENS = Field(
    default=None,
    ge=1,
    description=(
        "how many of these may stand for images and videos; null: all. Rows of patches, or "
        "features of a frozen tower, have room for as many: lower it where few are"
    ),
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BatchConfig(Section):
    """How a step's data are cut."""

    prompts_per_step: int = Field(default=64, ge=1)
    """P: prompts sampled in a step"""
    prompts_per_minibatch: int | None = Field(default=None, ge=1)
    """prompts in one update; null takes all of them"""
    epochs_per_step: int = Field(default=1, ge=1)
    """passes over a step's data"""
    max_tokens_per_device: int = 16384
    """tokens of a micro-batch on each device: bounds memory, never exceeded"""
    max_visual_tokens_per_device: int | None = VISUAL_TOKENS


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftBatchConfig(Section):
    """How the examples are cut."""

    examples_per_step: int = Field(default=64, ge=1)
    """examples in one update"""
    max_tokens_per_device: int = 16384
    """tokens of a micro-batch on each device: bounds memory, never exceeded"""
    max_visual_tokens_per_device: int | None = VISUAL_TOKENS


MESH_AXES = ("stage", "expert", "data", "fsdp", "context", "tensor")
"""As `sharding.layout.AXES`, here so that a config can be checked without jax."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshSizes(Section):
    """A device mesh: devices along each axis, of which one may be -1 and takes what is left."""

    stage: int = 1
    """pipeline parallelism: stages of layers, one after another"""
    expert: int = 1
    """expert parallelism: parts of the experts; they split the batch, too"""
    data: int = 1
    """data parallelism: copies of the model that share the batch"""
    fsdp: int = -1
    """parts of the batch that split parameters among them"""
    context: int = 1
    """context parallelism: parts of each row of tokens"""
    tensor: int = 1
    """tensor parallelism: parts of heads, feed-forward and vocabulary"""
    first_device: int = Field(default=0, ge=0)
    """index of the first device"""
    devices: int | None = Field(default=None, ge=1)
    """devices in all; null takes those that are left"""

    def __post_init__(self) -> None:
        """Refuse sizes that are none."""
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        several_open = list(sizes.values()).count(-1) > 1
        if several_open or any(size < 1 and size != -1 for size in sizes.values()):
            shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ConfigError(f"expected sizes of 1 or more, at most one of them -1, got {shown}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutSizes(MeshSizes):
    """The mesh of the engine: by default every device holds the whole model."""

    data: int = -1
    """data parallelism: copies of the model that share the sequences"""
    fsdp: int = 1
    """parts of the sequences that split parameters among them"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftMeshConfig(Section):
    """The device mesh, and how arrays lie on it."""

    train: MeshSizes = Field(default_factory=MeshSizes)
    context_by: Literal["heads", "keys", "ring"] = "heads"
    """attention over rows split by context: heads (Ulysses), keys (gathered), ring"""
    rules: Table = Field(default={})
    """mesh axes by logical axis, in place of the default rules"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshConfig(SftMeshConfig):
    """The device meshes, and how arrays lie on them."""

    rollout: RolloutSizes = Field(default_factory=RolloutSizes)
    critic: MeshSizes | None = None
    """of the critic; null: as train"""
    reference: MeshSizes | None = None
    """of the reference; null: as train"""
    reward_model: MeshSizes | None = None
    """of reward models; null: as train"""
    teacher: MeshSizes | None = None
    """of teachers; null: as train"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServeMeshConfig(Section):
    """The device mesh of a server, and how arrays lie on it."""

    rollout: RolloutSizes = Field(default_factory=RolloutSizes)
    rules: Table = Field(default={})
    """mesh axes by logical axis, in place of the default rules"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineMeshConfig(Section):
    """The device mesh of an engine that stands alone."""

    rollout: RolloutSizes = Field(default_factory=RolloutSizes)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OffloadConfig(Section):
    """What waits in the host's memory while it is not used."""

    params: bool = False
    """weights of the models that are trained"""
    optimizer: bool = False
    """the optimizers' states"""
    reference: bool = False
    """weights of the reference"""
    teacher: bool = False
    """weights of the teachers"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationConfig(Section):
    """Validation on data.validation."""

    before: bool = True
    """validate before the first step"""
    every: int = Field(default=0, ge=0)
    """validate every n steps; 0 only at the end"""
    samples: int = Field(default=1, ge=1)
    """k: responses per prompt, for mean@k, best@k, maj@k"""
    temperature: Number = Field(default=0.0, ge=0)
    """softmax temperature; 0 is greedy"""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """nucleus: sample from the smallest set with this mass"""
    rows: int | None = Field(default=None, ge=1)
    """the first n rows only; null takes all"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig(Section):
    """Checkpoints in run_dir/checkpoints."""

    every: int = Field(default=0, ge=0)
    """save every n steps; 0 only at the end"""
    keep: int = Field(default=2, ge=1)
    """newest checkpoints to keep, besides the best by validation"""
    grace_s: Number = Field(default=120.0, gt=0)
    """seconds in which a run that gets SIGTERM must finish its step and save"""
    resume: Literal["auto", "never"] = "auto"
    """auto continues from the newest checkpoint; never refuses to"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig(Section):
    """What a run says of itself, besides run_dir/metrics.jsonl."""

    trackers: Several[Function] = function_key(functions.TRACKERS, (FunctionSpec("tensorboard"),))
    """list of functions in monitoring.trackers, where each step goes besides; [] has
    none"""
    profile_steps: Several[int] = ()
    """steps whose trace and a summary of it go to run_dir/profile/step_<n>, as in [5]"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainLogConfig(LogConfig):
    """The same for a run that samples answers."""

    answers_every: int = Field(default=50, ge=0)
    """show a few answers of every n-th step, of the first and of the last, on the screen and to
    trackers; 0 shows none"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClusterConfig(Section):
    """The nodes of a Ray cluster, and what happens when one is lost."""

    address: str | None = None
    """host:port, ray://host:port or auto; null: RAY_ADDRESS, else this machine alone"""
    nodes: int = Field(default=1, ge=1)
    """nodes that train"""
    processes_per_node: int = Field(default=1, ge=1)
    """training processes on each of them"""
    devices: int | None = Field(default=None, ge=1)
    """devices of each training process; null: its part of the node's GPUs"""
    cpus: int = Field(default=1, ge=1)
    """CPUs that Ray reserves for each process and engine"""
    reward_tasks: int = Field(default=0, ge=0)
    """responses scored at once, in tasks on all nodes; 0: reward.workers of each process score"""
    env: Table = Field(default={})
    """environment variables for all processes"""
    start_timeout_s: Number = Field(default=300.0, gt=0)
    """seconds for Ray and all nodes to be there"""
    restarts: int = Field(default=3, ge=0)
    """restarts of the job, or of an engine, after a failure"""
    backoff_s: Number = Field(default=10.0, ge=0)
    """seconds before the first restart; doubled for each further one"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LimitsConfig(Section):
    """What bounds the requests to a server."""

    max_running: int = Field(default=256, ge=1)
    """requests that run at once; others wait"""
    max_waiting: int = Field(default=1024, ge=0)
    """requests that wait; more are refused with status 429"""
    max_answers: int = Field(default=128, ge=1)
    """completions that one request may ask for"""
    max_body_mb: Number = Field(default=8.0, gt=0)
    """megabytes of a request's body; larger ones are refused with status 413"""
    timeout_s: Number = Field(default=600.0, gt=0)
    """seconds for one request, waiting included; then status 504"""
    shutdown_s: Number = Field(default=30.0, ge=0)
    """seconds for running requests to finish when the server gets SIGTERM"""

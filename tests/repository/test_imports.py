"""Imports point one way, and the core needs few packages, as docs/architecture.md says."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.code.structure import (
    LINKED,
    SIDECAR,
    find_circles,
    folder_graph,
    import_graph,
    list_files,
    module_name,
    read_imports,
)

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "sharding": {"sharding"},
    "models": {"models", "sharding"},
    "algorithms": {"algorithms"},
    "jaxrl_llm": {"jaxrl_llm", *LINKED},
}
FEW = {"jax", "flax", "optax", "numpy", "jaxtyping", "chex", "safetensors"}
FEW |= {"jaxlib", "ml_dtypes"}  # installed with jax
FEWER = {"jax", "numpy", "chex", "jaxtyping"}
CORE = ("algorithms/", "models/", "sharding/", "jaxrl_llm/rollout/native/")
CORE += ("jaxrl_llm/training/update.py", "jaxrl_llm/types.py")
HEAVY = {"ray", "grain", "vllm", "torch", "transformers", "pandas", "datasets", "pyarrow"}
HEAVY |= {"wandb", "tensorboardX", "math_verify", "mlflow", "trackio", "swanlab", "comet_ml"}
ON_RAY = ("jaxrl_llm/cluster/launch.py", "jaxrl_llm/rollout/remote.py")
OTHERS = {"orbax", "flax", "chex", "rich", "yaml", "jinja2", "tokenizers", "huggingface_hub"}
FLOORS = (
    ("algorithms", "sharding", "workers"),
    ("config",),
    ("models",),
    ("data", "sandbox", "runs", "monitoring"),
    ("rollout",),
    ("rewards",),
    ("training",),
    ("evaluation", "planning", "reporting", "serving", "cluster"),
)
"""Folders of the library: one imports only from its own floor and from those before it."""

UPWARDS: set[tuple[str, str]] = set()
"""Imports that still point upwards; a change may only take some away."""

CIRCLES_OF_A_FLOOR: list[list[str]] = []
"""Folders of one floor that import each other; likewise."""

PROGRAMS = {
    f"jaxrl_llm.{name}"
    for name in ("train", "sft", "prefer", "evaluate", "serve", "export", "plan", "report")
}


def complaints(path, source):
    """List what is wrong with the imports of a file, given its path from the root."""
    home, messages = path.partition("/")[0], []
    allowed = {"ray"} if path in ON_RAY else set()  # these are imported lazily themselves
    for name, lazy in read_imports(path, source):
        top, *below = name.split(".")
        if path.startswith(SIDECAR):
            beside = (ROOT / SIDECAR / f"{top}.py").exists()
            if not beside and top not in {*sys.stdlib_module_names, "torch", "vllm", "PIL"}:
                messages.append(f"{path} imports {name}: it has torch, vllm and PIL")
        elif top in LINKED:
            messages.append(f"{path} imports {name} bare")
        elif top == "jaxrl_llm":
            folder = below[0] if below and below[0] in LINKED else "jaxrl_llm"
            is_lazy = name.startswith("jaxrl_llm.lazy.")  # which imports the standard library alone
            if home in MAY_IMPORT and folder not in MAY_IMPORT[home] and not is_lazy:
                messages.append(f"{path} imports {name}: a wrong arrow")
        elif home not in MAY_IMPORT or top in sys.stdlib_module_names:
            continue
        elif home == "algorithms" and top not in FEWER:
            messages.append(f"{path} imports {name}: algorithms use {sorted(FEWER)}")
        elif not lazy and (top in HEAVY - allowed or (path.startswith(CORE) and top not in FEW)):
            messages.append(f"{path} imports {name} outside a function")
    return messages


@pytest.fixture(scope="module")
def sources():
    return list_files(ROOT, (*MAY_IMPORT, "configs", "tests", "benchmarks"))


def test_imports_point_one_way_and_the_core_needs_few_packages(sources):
    walked = {path.rpartition("/")[0] for path in sources}
    assert {"algorithms", "models/hf", "sharding", "jaxrl_llm/rollout/native"} <= walked
    assert not any(folder.startswith("jaxrl_llm/models") for folder in walked)
    wrong = [text for path, source in sources.items() for text in complaints(path, source)]
    assert wrong == []


def test_no_modules_import_each_other(sources):
    """Nor by imports inside functions, or under `if TYPE_CHECKING:`."""
    circles = find_circles(import_graph(sources))
    assert circles == []


def test_folders_import_from_their_own_floor_and_from_those_before_it(sources):
    folders = folder_graph(import_graph(sources))
    floor_of = {name: number for number, names in enumerate(FLOORS) for name in names}
    assert folders.keys() - {"configs"} == floor_of.keys()
    edges = {(one, other) for one in floor_of for other in folders[one]}
    assert {(one, other) for one, other in edges if floor_of[other] > floor_of[one]} == UPWARDS
    level = {name: {o for o in folders[name] if floor_of[o] == floor_of[name]} for name in floor_of}
    assert find_circles(level) == CIRCLES_OF_A_FLOOR


def test_programs_are_imported_by_nothing(sources):
    library = {module_name(path) for path in sources if path.startswith(tuple(MAY_IMPORT))}
    graph = import_graph(sources)
    importers = {
        (module, program)
        for module in library - {"jaxrl_llm"}  # which has the programs' functions for its users
        for program in graph[module] & PROGRAMS
    }
    assert importers == set()


WRONG = [
    ("sharding/layout.py", "def f():\n    from jaxrl_llm.models.spec import x", "a wrong arrow"),
    ("models/decoder.py", "from ..algorithms.losses import gspo", "a wrong arrow"),
    ("algorithms/kl.py", "import jaxrl_llm", "a wrong arrow"),
    ("algorithms/kl.py", "def f():\n    import optax", "algorithms use"),
    ("jaxrl_llm/training/loop.py", "def f():\n    import models.hf", "bare"),
    ("jaxrl_llm/training/update.py", "import rich", "outside a function"),
    ("jaxrl_llm/training/loop.py", "try:\n    import torch.nn\nexcept Exception: ...", "outside"),
    (f"{SIDECAR}a.py", "def f():\n    import jaxrl_llm.types", "it has torch, vllm and PIL"),
]


def test_a_wrong_import_is_found():
    missed = [case for case in WRONG if case[2] not in "".join(complaints(*case[:2]))]
    assert missed == []


def test_the_core_imports_where_nothing_else_is_installed():
    source = f"""if True:
        import sys

        class Blocked:
            def find_spec(name, *_):
                if name.partition(".")[0] in {HEAVY | OTHERS}:
                    raise ImportError(name + " is blocked")

        sys.meta_path.insert(0, Blocked)
        import jaxrl_llm.algorithms.losses, jaxrl_llm.models.decoder, jaxrl_llm.models.hf
        import jaxrl_llm.sharding.reshard, jaxrl_llm.rollout.native.engine
        import jaxrl_llm.training.update
        import torch
    """
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stderr.rstrip().rpartition("\n")[2]
    assert last == "ImportError: torch is blocked", done.stderr


def test_workers_import_the_standard_library_alone():
    source = """if True:
        import sys
        before = set(sys.modules)
        import jaxrl_llm.workers.supervisor, jaxrl_llm.rewards.worker, jaxrl_llm.rollout.tools.tool
        tops = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(sorted(tops - sys.stdlib_module_names))
    """
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['jaxrl_llm']\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("train", ["--config", "quickstart", "--print-config"]),
        ("sft", ["--config", "quickstart_sft", "--print-config"]),
        ("evaluate", ["--model", "m", "--data", "d", "--print-config"]),
        ("serve", ["--model", "m", "--print-config"]),
        ("train", ["--config", "quickstart", "optim.no_such_key=1"]),
    ],
)
def test_a_config_is_checked_before_anything_heavy_is_imported(program, words):
    source = f"import importlib; importlib.import_module('jaxrl_llm.{program}').main({words})"
    assert not imported(source) & {
        *("jax", "numpy", "optax", "orbax", "scipy", "rich", "pyarrow", "pandas", "torch"),
        *("transformers", "tensorboardX", "ray", "uvicorn", "starlette", "matplotlib"),
    }


def test_what_not_every_run_needs_is_imported_by_those_that_do():
    source = "import jaxrl_llm.training.run, jaxrl_llm.evaluation.evaluation, jaxrl_llm.sft"
    source += ", jaxrl_llm.cluster.actors, jaxrl_llm.rollout.vllm.engine"
    assert not imported(source) & {*HEAVY, "scipy", "matplotlib", "IPython"}


def imported(source):
    """Return the packages that a program has imported at its end."""
    source = f"""if True:
        import sys
        {source}
        print("imported", *{{name.partition(".")[0] for name in sys.modules}})
    """
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "imported"
    return set(last[1:])

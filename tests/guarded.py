"""Paths that slow tests guard, by what is in them: `pytestmark = pytest.mark.guards(*MODEL)`."""

MODEL = ("models/", "sharding/")
UPDATE = ("algorithms/", "jaxrl_llm/training/", "jaxrl_llm/data/")
NATIVE = ("jaxrl_llm/rollout/native/",)
RUN = ("jaxrl_llm/training/", "jaxrl_llm/runs/", "jaxrl_llm/data/", "sharding/")
"""What a run is made of that is killed and goes on."""

CLUSTER = ("jaxrl_llm/cluster/", "jaxrl_llm/rollout/", "sharding/distributed.py")

EVALUATION = ("jaxrl_llm/evaluation/",)
EVALUATION += tuple(f"jaxrl_llm/training/{name}.py" for name in ("policy", "validation", "dumps"))
PLANNING = ("jaxrl_llm/planning/", "jaxrl_llm/training/compile.py")

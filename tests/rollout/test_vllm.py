import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.rollout.engine import EngineError, EngineSettings, Request, SamplingParams, Stop
from jaxrl_llm.rollout.vllm import engine as vllm_engine
from jaxrl_llm.rollout.vllm.engine import VllmEngine
from tests.rollout.conftest import (
    build,
    check_logprobs,
    check_same,
    expected_logprobs,
    far_from_uniform,
)
from tests.specs import DENSE
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.guards("jaxrl_llm/rollout/", "models/"),
]

WIDTHS = {"vocab_size": 96, "hidden_size": 64, "head_dim": 32, "ff_width": 96}
SPEC = dataclasses.replace(DENSE, **WIDTHS, tied_embeddings=True, max_positions=512)
MAX_TOKENS = 256
PROMPT = tuple(range(7, 27))


FIRST, SECOND, THIRD = (far_from_uniform(SPEC, seed, times=8) for seed in range(3))


def check(engine, params, *, version=None, requests=None, atol=5e-5):
    """Compare answers of an engine with forward passes of the trainer; return the answers."""
    requests = requests or [ask(seed=seed) for seed in range(2)]
    answers = engine.sample(requests)
    for request, answer in zip(requests, answers, strict=True):
        check_logprobs(params, request, answer, SPEC, atol=atol)
        assert version is None or set(answer.versions) == {version}
    return answers


def ask(tokens=24, seed=0, prompt=PROMPT, **options):
    return Request(tuple(map(int, prompt)), SamplingParams(tokens, **options), seed)


def make(folder, **changed):
    settings = EngineSettings(max_running_sequences=16, max_tokens=MAX_TOKENS)
    config = VllmConfig(**{"timeout_s": 20.0, "start_timeout_s": 240.0} | changed)
    return VllmEngine(SPEC, settings, source=None, config=config, folder=folder)


@contextlib.contextmanager
def opened(folder, **changed):
    with contextlib.closing(make(folder, **changed)) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("vllm"), restarts=20) as engine:
        yield engine


@pytest.fixture
def base():
    """A temporary folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.fixture
def engine(shared_engine):
    shared_engine.load(FIRST, version=0)
    yield shared_engine
    shared_engine.resume()


def pid_of(engine, number=0):
    wait_until(lambda: engine._replicas[number].sidecar is not None, 120)
    return engine._replicas[number].sidecar._process.pid


def at_work(engine, requests):
    """Sample in a thread; return it and where answers will be, when there are some, but not all."""
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(engine.sample(requests)))
    thread.start()
    wait_until(lambda: 0 < engine.stats().in_flight < len(requests))
    return thread, answers


def alive_in(group):
    """Return the processes of a group that are not zombies."""
    command = ["ps", "-eo", "pid,pgid,stat"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()[1:]]
    return [int(pid) for pid, pgid, stat in rows if int(pgid) == group and stat[0] != "Z"]


def test_log_probs_are_those_of_the_trainers_forward_pass(engine):
    options = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 0.5, "top_k": 3}]
    options += [{"temperature": 1.4, "top_p": 0.8}, {"temperature": 0.7, "top_k": 5, "min_p": 0.05}]
    requests = [ask(seed=seed, **each) for seed, each in enumerate(options)]
    for answer in check(engine, FIRST, version=0, requests=requests, atol=2e-5):
        assert (answer.finish, len(answer.tokens)) == ("length", 24)
    long = tuple(np.arange(130) % 90)
    engine.sample([ask(prompt=long, tokens=4)])
    receipt = engine.load(SECOND, version=7)
    assert receipt[:2] == (7, None)  # vLLM holds other arrays
    assert receipt.moved_bytes >= 4 * sum(leaf.size for leaf in jax.tree.leaves(SECOND))
    check(engine, SECOND, version=7, requests=[ask(prompt=long)])  # no old prefix is used


def test_bias_penalty_and_top_log_probs_are_the_native_engines(engine):
    ways = [{"repetition_penalty": 1.3}, {"logit_bias": ((5, 2.0), (9, -50.0))}]
    requests = [ask(temperature=0.0, top_logprobs=3, **way) for way in ways]
    with contextlib.closing(build(model=SPEC, max_tokens=64)) as own:
        own.load(FIRST, version=0)
        expected = own.sample(requests)
    answers = engine.sample(requests)
    check_same(answers, expected, atol=2e-5)
    for answer, want in zip(answers, expected, strict=True):
        np.testing.assert_array_equal(answer.top[0], want.top[0])
        np.testing.assert_allclose(answer.top[1], want.top[1], atol=2e-5)


def test_a_stop_token_ends_the_answer_and_company_changes_nothing(engine):
    [whole] = engine.sample([ask(temperature=0.0)])
    rng = np.random.default_rng(0)
    others = [ask(9, seed=i, prompt=rng.integers(0, 96, rng.integers(1, 60))) for i in range(300)]
    among = engine.sample([*others[:15], ask(temperature=0.0), *others[15:]])
    assert among[15].tokens.tolist() == whole.tokens.tolist()
    assert len({tuple(a.tokens) for a in engine.sample([ask(seed=i) for i in range(8)])}) == 8
    stop = int(whole.tokens[3])
    first = whole.tokens.tolist().index(stop)
    [answer] = engine.sample([ask(temperature=0.0, stop_ids=(stop,))])
    assert (answer.finish, answer.stopped_by) == ("stop", stop)
    assert answer.tokens.tolist() == whole.tokens[: first + 1].tolist()


def test_answers_can_be_streamed_and_given_up(engine):
    async def streamed():
        return [piece async for piece in engine.stream(ask(seed=3))]

    pieces = asyncio.run(streamed())
    [whole] = engine.sample([ask(seed=3)])
    assert len(pieces) > 2
    assert np.concatenate([p.tokens for p in pieces]).tolist() == whole.tokens.tolist()
    assert [bool(piece.finish) for piece in pieces] == [False] * (len(pieces) - 1) + [True]

    async def given_up():
        task = asyncio.create_task(engine.generate(ask(tokens=200)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(given_up())
    assert engine.stats().in_flight == 0


def test_answers_are_left_and_gone_on_with(engine):
    requests = [ask(tokens=count, temperature=0.0) for count in (4, 60, 60)]
    whole = engine.sample(requests)
    parts = engine.sample_until(requests, 1)
    assert [part.finish for part in parts] == ["length", "", ""]
    stop = Stop()
    threading.Timer(0.2, stop.set).start()
    begun = zip(requests[1:], parts[1:], strict=True)
    left = [dataclasses.replace(request, drawn=part) for request, part in begun]
    parts = engine.sample_until(left, 2, stop)
    assert all(part.finish or len(part.tokens) < 60 for part in parts)
    begun = [dataclasses.replace(r, drawn=a) for r, a in zip(left, parts, strict=True)]
    answers = [a if a.finish else engine.sample([b])[0] for a, b in zip(parts, begun, strict=True)]
    check_same(answers, whole[1:])
    assert [set(answer.versions) for answer in answers] == [{0}] * 2


def test_what_runs_goes_on_through_a_pause_and_with_new_weights(engine):
    answers = []
    # more than are decoded at once, and than are done before the sidecar's next report
    requests = [ask(tokens=200, seed=seed) for seed in range(150)]
    thread = threading.Thread(target=lambda: answers.extend(engine.sample(requests)))
    sidecar = engine._replicas[0].sidecar
    before = sidecar._progress["generated"]
    thread.start()
    wait_until(lambda: sidecar._progress["generated"] > before + 100)
    engine.sleep()
    assert thread.is_alive()
    assert engine.load(SECOND, version=1).version == 1
    engine.wake()
    thread.join(100)
    assert len(answers) == 150
    assert {0, 1} <= {int(v) for answer in answers for v in answer.versions}
    for answer in answers:
        first = int(np.sum(answer.versions == 0))
        assert answer.versions.tolist() == [0] * first + [1] * (200 - first)
        for params, part in ((FIRST, slice(first)), (SECOND, slice(first, None))):
            expected = expected_logprobs(params, ask(), answer, SPEC)[part]
            np.testing.assert_allclose(answer.logprobs[part], expected, atol=5e-5)


def test_of_a_weight_sync_that_was_given_up_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "BUCKET_BYTES", 2**13)  # less than any matrix
    with opened(tmp_path, tensor_parallel=2) as engine:
        engine.load(FIRST, version=0)
        sent, write, tell = engine._buffer, engine._buffer.write, vllm_engine._as_messages
        assert len(sent.buckets) > 12

        def short(params, version):
            yield from itertools.islice(write(params, version), count)
            raise OSError("full")

        def other(entries):
            return tell(e._replace(name=e.name.replace("1.mlp.up_proj", "x")) for e in entries)

        for count in range(1, len(sent.buckets), 3):
            for params, place, name, change, error in (
                (SECOND, sent, "write", short, OSError),
                (FIRST, vllm_engine, "_as_messages", other, EngineError),
            ):
                with monkeypatch.context() as patch, pytest.raises(error, match=r"full|parameter"):
                    patch.setattr(place, name, change)
                    engine.load(THIRD, version=100)
                engine.load(params, version=count)
                check(engine, params, version=count)
        assert engine.stats().restarts == 0


def test_ranks_share_a_copy_and_the_end_of_one_is_the_end_of_the_sidecar(tmp_path):
    requests = [ask(tokens=100, seed=i) for i in range(40)]
    with opened(tmp_path, tensor_parallel=2) as engine:
        for version, params in enumerate((FIRST, SECOND)):
            assert engine.load(params, version=version).version == version
            expected = check(engine, params, requests=requests)
        killed = pid_of(engine)
        ranks = [p for p in alive_in(killed) if "Worker" in Path(f"/proc/{p}/cmdline").read_text()]
        assert len(ranks) == 2
        worker, answers = at_work(engine, requests)
        os.kill(ranks[1], signal.SIGKILL)
        worker.join(240)
        assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in expected]
        assert engine.stats().restarts == 1
        wait_until(lambda: not alive_in(killed))


def test_a_sidecar_killed_in_the_middle_of_a_weight_sync_gets_the_new_weights(engine, monkeypatch):
    killed, tell = pid_of(engine), vllm_engine._as_messages

    def deadly(entries):
        monkeypatch.undo()
        os.killpg(killed, signal.SIGKILL)
        return tell(entries)

    monkeypatch.setattr(vllm_engine, "_as_messages", deadly)
    assert engine.load(SECOND, version=5).version == 5
    assert pid_of(engine) != killed
    check(engine, SECOND, version=5)


def test_a_sidecar_whose_model_hangs_is_replaced(engine):
    hung = pid_of(engine)
    worker, answers = at_work(engine, [ask(tokens=200, seed=i) for i in range(40)])
    for pid in alive_in(hung):
        if pid != hung:
            os.kill(pid, signal.SIGSTOP)
    assert engine.load(FIRST, version=1).version == 1  # this caller finds out first
    worker.join(240)
    assert [len(answer.tokens) for answer in answers] == [200] * 40
    assert pid_of(engine) != hung
    wait_until(lambda: not alive_in(hung))


def test_one_that_dies_too_often_ends_the_engine_and_says_why(tmp_path):
    with opened(tmp_path, restarts=0) as engine:
        engine.load(FIRST, version=0)
        os.kill(pid_of(engine), signal.SIGKILL)
        with pytest.raises(EngineError, match="sidecar_0"):
            engine.sample([ask(tokens=200)])
        with pytest.raises(EngineError, match="9"):
            engine.load(FIRST, version=1)


def test_no_process_file_or_shared_memory_is_left_of_a_trainer_that_was_killed(tmp_path, base):
    before = set(Path("/dev/shm").iterdir())
    script = tmp_path / "trainer.py"
    here = Path(__file__).parent
    script.write_text(
        "import sys, time, pathlib\n"
        f"sys.path[:0] = {[str(here), str(here.parents[1])]!r}\n"
        "import test_vllm as t\n"
        f"folder, env = pathlib.Path({str(tmp_path)!r}), {{'TMPDIR': {base!r}}}\n"
        "engine = t.make(folder, tensor_parallel=2, env=env)\n"
        "engine.load(t.FIRST, version=0)\n"
        "print(t.pid_of(engine), flush=True)\n"
        "engine.sample([t.ask(tokens=200, seed=i) for i in range(500)])\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as trainer:
        group = int(trainer.stdout.readline())
        assert len(alive_in(group)) >= 2
        assert set(Path("/dev/shm").iterdir()) - before
        assert list(Path(base).iterdir())
        trainer.kill()
    wait_until(lambda: not alive_in(group))
    wait_until(lambda: set(Path("/dev/shm").iterdir()) <= before)
    wait_until(lambda: not list(Path(base).iterdir()))


def test_two_sidecars_share_the_work_and_one_takes_over(tmp_path):
    with opened(tmp_path, sidecars=2) as engine:
        engine.load(FIRST, version=0)
        requests = [ask(tokens=60, seed=i, prompt=(i % 90, 5, 6)) for i in range(32)]
        expected = engine.sample(requests)
        wait_until(lambda: all(r.sidecar._progress["generated"] for r in engine._replicas))
        os.kill(pid_of(engine, 1), signal.SIGKILL)
        answers = engine.sample(requests)
        assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in expected]
        engine.load(SECOND, version=1)
        assert [replica.version for replica in engine._replicas] == [1, 1]


ELSEWHERE = """unshare --mount --pid --fork --mount-proc bash -c '
mount -t tmpfs -o size=64k none /dev/shm && head -c 40k /dev/zero > /dev/shm/filled
exec "$0" "$@"'"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces, which takes root")
def test_a_sidecar_in_a_container_gets_weights_through_the_connection(tmp_path, base):
    with opened(tmp_path, launch=(ELSEWHERE,), env={"TMPDIR": base}) as engine:
        for version, params in enumerate((FIRST, SECOND)):
            engine.load(params, version=version)
            assert not engine._replicas[0].sidecar.shared
            check(engine, params, version=version)
        assert list(Path(base).iterdir())
    assert not list(Path(base).iterdir())

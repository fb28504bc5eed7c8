"""Log-probs of given tokens by the engine are those of a forward pass."""

import jax
import numpy as np
import pytest

from jaxrl_llm.rollout.engine import EngineError, Request, SamplingParams
from jaxrl_llm.rollout.native import programs


def expected(next_logits, params, tokens):
    return np.asarray(jax.nn.log_softmax(next_logits(params, tokens)))[:-1]


@pytest.mark.parametrize("read_at_once", [8, 256])
def test_scores_are_those_of_a_forward_pass(monkeypatch, build, params, next_logits, read_at_once):
    monkeypatch.setattr(programs, "READ_AT_ONCE", read_at_once)
    engine = build(devices=2)  # a row of each part is read
    assert engine.scores_tokens
    engine.programs.warm_up = lambda *_: None
    engine.load(params, version=0)
    try:
        for length in (1, 2, 19, 39):
            tokens = np.random.default_rng(length).integers(0, 32, length).tolist()
            scored = engine.score_tokens(tokens)
            logprobs = expected(next_logits, params, tokens)
            assert scored.logprobs.shape == (length,) and scored.logprobs[0] == 0
            drawn = logprobs[np.arange(length - 1), tokens[1:]]
            np.testing.assert_allclose(scored.logprobs[1:], drawn, atol=1e-5)
            best = np.sort(logprobs, axis=1)[:, ::-1][:, : scored.top_ids.shape[1]]
            np.testing.assert_allclose(scored.top_logprobs[1:], best, atol=1e-5)
            at = np.take_along_axis(logprobs, scored.top_ids[1:], axis=1)
            np.testing.assert_allclose(scored.top_logprobs[1:], at, atol=1e-5)
    finally:
        engine.close()


def test_scoring_and_sampling_do_not_disturb_each_other(engine, params, next_logits):
    sampling = SamplingParams(max_new_tokens=20)
    alone = engine.sample([Request((3, 1, 4), sampling, seed) for seed in range(3)])
    futures = engine._submit([Request((3, 1, 4), sampling, seed) for seed in range(3)])
    scored = [engine.score_tokens([3, 1, 4, 1, 5]) for _ in range(4)]
    for future, answer in zip(futures, alone, strict=True):
        assert future.result(60).tokens.tolist() == answer.tokens.tolist()
    drawn = expected(next_logits, params, [3, 1, 4, 1, 5])[range(4), [1, 4, 1, 5]]
    for each in scored:
        np.testing.assert_allclose(each.logprobs[1:], drawn, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "does not fit"), ([1] * 40, "does not fit"), ([1, 32], "token id 32")],
)
def test_what_does_not_fit_is_refused(engine, tokens, message):
    with pytest.raises(EngineError, match=message):
        engine.score_tokens(tokens)


def test_an_engine_without_weights_scores_nothing(hollow, params):
    engine = hollow()
    with pytest.raises(EngineError, match="no weights"):
        engine.score_tokens([1, 2])

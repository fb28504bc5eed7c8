"""Algorithms as pure functions: arrays in, arrays out."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.algorithms.advantages import (
        dr_grpo,
        gae,
        gae_turns,
        gae_whitened,
        gdpo,
        gpg,
        grpo,
        grpo_pass_at_k,
        grpo_turns,
        kl_penalized_rewards,
        opo,
        optimal_token_baseline,
        optimal_token_baseline_corrected,
        optimal_token_baseline_multi_turn,
        prime,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        reverse_kl,
        reward_to_go,
        rewards_from_scores,
        rloo,
        to_tokens,
        whiten,
    )
    from jaxrl_llm.algorithms.correction import (
        icepop,
        mismatch_metrics,
        normalized,
        reject_old,
        reject_sequence,
        reject_sequence_geometric,
        reject_sequence_k3,
        second_moment_mask,
        truncated_sequence,
        truncated_sequence_normalized,
        truncated_token,
        truncated_token_normalized,
    )
    from jaxrl_llm.algorithms.distillation import (
        Comparison,
        DivergenceStats,
        TeacherHidden,
        TeacherTop,
        divergence_stats,
        divergence_stats_from_logits,
        likeliest_tokens,
        with_tail,
    )
    from jaxrl_llm.algorithms.divergences import (
        forward_kl_divergence,
        generalized_jsd,
        reverse_kl_divergence,
    )
    from jaxrl_llm.algorithms.kl import (
        absolute,
        absolute_with_k2_gradient,
        adaptive,
        fixed,
        k1,
        k1_with_k2_gradient,
        k2,
        k3,
        k3_with_k2_gradient,
    )
    from jaxrl_llm.algorithms.logprobs import (
        HeadProjection,
        TokenStats,
        entropy_from_logits,
        logprobs_from_logits,
        projected_token_stats,
        token_stats,
        token_stats_from_logits,
    )
    from jaxrl_llm.algorithms.losses import (
        TokenLoss,
        a3po,
        cispo,
        clip_cov,
        dppo_kl,
        dppo_tv,
        dro,
        gmpo,
        gspo,
        kl_cov,
        negative_log_likelihood,
        ppo_clip,
        reinforce,
        sapo,
        select_clip_cov,
        select_kl_cov,
    )
    from jaxrl_llm.algorithms.pairs import Pairs, all_pairs, best_and_worst
    from jaxrl_llm.algorithms.preferences import (
        PairLoss,
        apo_down,
        apo_zero,
        apo_zero_labelled,
        bradley_terry,
        bradley_terry_margin,
        cpo,
        dpo,
        dpo_length_normalized,
        ipo,
        kto,
        nca,
        orpo,
        robust_dpo,
        rpo,
        simpo,
        slic,
        step_cross_entropy,
    )
    from jaxrl_llm.algorithms.reduce import (
        sequence_mean_token_mean,
        sequence_mean_token_sum,
        sequence_mean_token_sum_norm,
        token_mean,
        token_sum,
    )
    from jaxrl_llm.algorithms.shaping import (
        at_least,
        best_of_group,
        mean_between,
        overlong_penalty,
        with_spread,
    )
    from jaxrl_llm.algorithms.values import (
        clipped_value_loss,
        implicit_reward_loss,
        squared_value_loss,
    )

attach(__name__)

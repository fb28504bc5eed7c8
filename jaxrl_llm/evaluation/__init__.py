"""Evaluation and validation: sampling, scores, estimators."""

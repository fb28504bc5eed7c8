"""Mixture of experts: each token passes a few of many feed-forward networks."""

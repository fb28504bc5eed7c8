"""Agents, their chats with the policy, and how many episodes are sampled at once."""

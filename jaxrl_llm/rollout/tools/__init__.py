"""Tools and environments of episodes, and the processes that run them."""

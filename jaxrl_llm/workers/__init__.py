"""Limited processes in which functions of users run: rewards, tools and environments."""

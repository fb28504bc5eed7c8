"""What can look wrong in a run: a rule for each, as a function of its history."""

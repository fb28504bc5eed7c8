"""What the planner works with: lowered steps, their programs, memory, time and remedies."""

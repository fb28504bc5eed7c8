"""A run as a page of HTML: what it learned, what looks wrong, its answers, and its time."""

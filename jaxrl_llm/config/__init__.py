"""Config files, keys, and the functions that they name."""

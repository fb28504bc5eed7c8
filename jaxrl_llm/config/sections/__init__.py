"""The sections of a config, a module each: `optim:` in YAML is declared in `optim.py`."""

"""The configurations that ship with the library, one YAML file each."""

"""The families of models, one file for each and its kin."""

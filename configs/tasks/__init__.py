"""Data sets that `python -m jaxrl_llm.data.prepare NAME` writes: NAME is a file here.

The file's function of that name draws or converts the rows, and writes them into `out`. A task of
your own is such a function in any file: `data.prepare: {fn: my_file.py:name, out: …}`.
"""

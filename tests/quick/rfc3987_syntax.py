"""In place of a package that JupyterLab brings along, while `make test` runs.

To import that one builds a grammar for addresses: two seconds of processor time in every process
that reads a notebook. jsonschema, which imports it, does without, and notebooks have no addresses
that it would look at.
"""

raise ImportError

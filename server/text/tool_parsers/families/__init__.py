"""The families of models by how they write tool calls: a row for each, named as in vLLM's or SGLang's settings.

A new family needs a row here, a writer in `tests/text/tool_parsers/writers.py`, its name in `docs/guide/tools.md`, and
its chat template in `tests/text/templates/tools`, if the licence allows it.
"""

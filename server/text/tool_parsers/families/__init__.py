"""The families of models by how they write tool calls: one row for each, named as vLLM's --tool-call-parser."""

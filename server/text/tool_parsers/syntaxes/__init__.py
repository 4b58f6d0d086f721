"""How families of models write tool calls: one reader for each way, which begins after the marker of a call.

A reader adds the calls it has read to `calls`, and raises NotACall where the text goes on otherwise. What follows the
last call that was kept is then text of the message. `formats.py` has the markers, and says which family writes how.
"""

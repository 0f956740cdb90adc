"""Pure decisions: which sequences run in the next step, with which tokens, in which cache blocks.

Nothing here does I/O, reads a clock or writes a log: the same state and the same input give the same output. The
boundary modules (`config`, `request`, `step`, `errors`) are plain Python and may be imported by the device layer; the
scheduler itself is the Cython module `scheduler`.
"""

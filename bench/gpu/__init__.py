"""``make gpu``: what is tried and measured on a machine with an NVIDIA GPU, in one command and a few minutes.

Each part is a process of its own with a limit of time (``running.py``), and writes what it found line by line
(``results.py``): one that fails or hangs costs its own results at most. ``page.py`` writes them as text.
"""

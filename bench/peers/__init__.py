"""The laws of training, tried on other libraries: ``make laws-of-peers``.

``laws`` states them, ``adapters`` holds one small script for each library, and ``docs/peers.json`` the results, from
which ``docs/generate.py`` writes tables.
"""

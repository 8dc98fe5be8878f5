"""Tools beside a run: what is measured before it or of it, and changes nothing in it.

May import ``entry`` and what is below. Begin with ``lr_find.py``: it runs ``fit`` on a fork of a State, with another
optimizer; ``range_test.py`` is its report. ``profile.py`` times the parts of a stream, by ``spans.py``;
``profile_report.py`` is its report. ``steps.py`` has the States of a stream after each algorithm, for ``changes.py``
and ``divergence.py``, of which ``diff.py`` makes its answer, of recorded runs by ``recorded.py``; ``parts.py`` is what
tools replace in a stream. ``rewind.py`` visits what a flight recorder kept, and ``inspection.py`` looks at a batch, by
``samples.py`` sample by sample.
"""

"""Tools beside a run: what is measured before it or of it, and changes nothing in it.

May import ``entry`` and what is below. Begin with ``lr_find.py``: it runs ``fit`` on a fork of a State, with another
optimizer; ``range_test.py`` is its report. ``profile.py`` times the parts of a stream; ``profile_report.py`` has its
spans and its report. ``steps.py`` has what tools replace in a stream, and its States after each algorithm, for
``changes.py`` and ``diff.py``. ``rewind.py`` visits what a flight recorder kept, and ``inspection.py`` looks at a
batch, by ``samples.py`` sample by sample.
"""

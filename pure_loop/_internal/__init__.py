"""Helpers with several users that know no State: records, pytrees, checks of arguments, the gate to torch.

May import: ``errors`` and ``event``. Begin with ``records.py`` (drafts of frozen records) and ``torch_private.py``, the
one file of eager code that names what torch keeps private.
"""

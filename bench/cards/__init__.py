"""The cards of algorithms: what each does, drawn and measured. ``make cards``, or ``make cards NAME=mixup`` for one.

``entries`` says how each is measured, on one of the ``problems``; ``measure`` trains, checks the laws and draws the
``pictures``, and writes docs/cards.json; ``pages`` renders that as docs/cards/NAME.md, which ``make docs`` does again.
Begin with ``entries``: an algorithm that joins the library gets a line there.
"""

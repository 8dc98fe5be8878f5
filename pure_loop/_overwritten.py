"""What stands in a State for that which the next step has written to: to read it is an error that says so."""

from __future__ import annotations

from typing import Any, NoReturn

from pure_loop.errors import DonatedStateError

__all__ = ["OVERWRITTEN_VALUE", "refuse_reading"]


def refuse_reading(*_: Any, **__: Any) -> NoReturn:
    """
    Raises:
        DonatedStateError: always.
    """
    raise DonatedStateError(
        "what this State had here (parameters, gradients, memory, counts) was overwritten by the step that followed "
        'it. With donate=True that happens to the parameters and the memory of every State: write donate="auto", which '
        'leaves alone what is kept, or donate=False. With "auto" it happens to the State in the loop variable alone, '
        "where the step after it failed half-way or somebody reads the variable while the step runs: keep what you "
        "need in another (kept = state)."
    )


class _OverwrittenValue:
    """In the place of a tensor, or of what holds some."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks for what it may do without
        refuse_reading()

    __torch_function__ = classmethod(refuse_reading)
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __len__ = __iter__ = __getitem__ = refuse_reading
    __eq__ = __ne__ = __reduce_ex__ = __array__ = __round__ = __trunc__ = __pos__ = refuse_reading
    __hash__ = None  # type: ignore[assignment]

    def __format__(self, spec: str) -> str:
        return refuse_reading() if spec else repr(self)

    def __repr__(self) -> str:
        return "<overwritten by the next step>"


_COMPARISONS = ("lt", "le", "gt", "ge")
_OF_ONE = ("neg", "abs", "invert")
_OF_TWO = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
_OF_BITS = ("and", "or", "xor", "lshift", "rshift")
for _name in (*_COMPARISONS, *_OF_ONE, *(f"{side}{name}" for side in ("", "r") for name in _OF_TWO + _OF_BITS)):
    setattr(_OverwrittenValue, f"__{_name}__", refuse_reading)

OVERWRITTEN_VALUE: Any = _OverwrittenValue()

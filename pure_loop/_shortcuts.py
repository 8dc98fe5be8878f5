"""Calls of torch's own modules in a private module, without what torch does around a ``forward``.

``nn.Module.__call__`` looks for hooks in eight places, for each module of a model and at each call, which takes longer
than some kernels do. It goes first to ``_compiled_call_impl``, if a module has one, where ``Module.compile`` puts what
it made. In a private module of torch's that has no hooks, its ``forward`` stands there, until there is a hook.

Torch's modules, because nobody else writes their ``forward``; a class of the user's is called as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Shortcuts", "has_any_global_hook", "hooks_so_far"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SHORTCUT = "_compiled_call_impl"

# Private to torch, which asks itself so before it calls a module.
has_any_global_hook: Callable[[], bool] = getattr(nn.modules.module, "_has_any_global_hook", lambda: True)


def hooks_so_far() -> int:
    """Another number after a hook was registered, on whichever tensor or module, or on all modules."""
    return RemovableHandle.next_id


class Shortcuts:
    """Those of a private module and of the modules in it.

    They refer to their modules, which refer to them: :meth:`remove` lets go of both.

    >>> from torch import nn
    >>> layer = nn.Sequential(nn.ReLU())
    >>> shortcuts = Shortcuts(layer)
    >>> shortcuts.hold()
    True
    >>> handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    >>> shortcuts.hold()
    False
    >>> handle.remove()
    """

    __slots__ = ("_checked", "_forwards", "_modules")

    def __init__(self, module: nn.Module) -> None:
        self._modules = [each for each in module.modules() if _is_plain(each)]
        # Somebody may put another one into the class.
        self._forwards = {type(each): type(each).forward for each in self._modules}
        self._checked: int | None = None
        for each in self._modules:
            members = vars(each)
            for name in _HOOKS:
                members[name] = _Hooks(each)
            members[_SHORTCUT] = each.forward

    def hold(self) -> bool:
        """Before a forward: whether a call may still take them. If not, they are gone."""
        registered = hooks_so_far()
        for cls, forward in self._forwards.items():
            if cls.forward is not forward:
                self.remove()
        if registered != self._checked:
            self._checked = registered
            if has_any_global_hook():
                self.remove()
        return bool(self._modules)

    def remove(self) -> None:
        for each in self._modules:
            vars(each).pop(_SHORTCUT, None)
        self._modules, self._forwards = [], {}


def _is_plain(module: nn.Module) -> bool:
    """Whether it is one of torch's own, as torch made it."""
    cls, members = type(module), vars(module)
    return (
        cls.__module__.startswith("torch.nn.modules.")
        and cls.__call__ is nn.Module.__call__
        and not any(members.get(name, True) for name in _HOOKS)
        and "forward" not in members
        and getattr(module, _SHORTCUT, True) is None
    )


class _Hooks(OrderedDict[int, Any]):
    """A module's hooks of one kind: none, and with the first one its shortcut goes."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._owner = ref(owner)

    def __setitem__(self, number: int, hook: Any) -> None:
        super().__setitem__(number, hook)
        owner = self._owner()
        if owner is not None:
            vars(owner).pop(_SHORTCUT, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)

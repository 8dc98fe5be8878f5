"""Files of ``torch.save``: what to write to load one, from the opcodes of its pickle, which is never opened.

The opcodes are read, as ``pickletools`` does it, and none is carried out: which texts there are, and which classes and
functions the file would call.
"""

from __future__ import annotations

import contextlib
import io
import pickletools
import zipfile
import zlib
from typing import BinaryIO

import attrs

# Bytes of a pickle that are read: the first names say enough, and a stranger's file is to cost little.
_MOST = 1 << 20
# What wraps a module, and is in the names of its weights then.
_WRAPPERS = ("module._orig_mod.", "_orig_mod.module.", "_orig_mod.", "module.", "model.")
# Under which keys programs save a state dict: torchvision and timm, Lightning, Composer.
_PLACES = ("state_dict", "model_state_dict", "model")
_SAFE = {"torch": None, "torch._utils": None, "torch.storage": None, "collections": {"OrderedDict", "Counter"}}
# What damaged and strange files raise.
_UNREADABLE = (
    *(ValueError, LookupError, OSError, EOFError, ArithmeticError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
# With which files of torch.save begin that are no zip files: 0x1950A86A20F9469CFC6C, as an opcode.
_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"


def advice_on(file: BinaryIO, path: object) -> str:
    """How the weights in a file of ``torch.save`` get into a module, and what is to be known before.

    Args:
        file: open, anywhere.
        path: for the text.
    """
    pickled = _Pickle.read(file)
    texts = pickled.texts
    keys = [text for text in texts if "." not in text]
    names = [text for text in texts if "." in text and text.rpartition(".")[2].isidentifier()]
    place = [key for key in _PLACES if key in keys][:1]
    if texts[:1] == ["state"] and place == ["model"]:
        place = ["state", "model"]
    is_module = any(name.startswith("torch.nn.modules.") for name in pickled.called)
    safe = pickled.of_torch and all(_is_safe(name) for name in pickled.called)
    weights = f"torch.load({str(path)!r}, map_location='cpu', weights_only={safe})"
    if not pickled.of_torch:
        weights = f"pickle.loads(pathlib.Path({str(path)!r}).read_bytes())"
    weights += ".state_dict()" if is_module else "".join(f"[{key!r}]" for key in place)
    prefix = next((text for text in _WRAPPERS if sum(name.startswith(text) for name in names) * 2 > len(names)), None)
    if prefix is not None and not is_module:
        weights = f"{{name.removeprefix({prefix!r}): value for name, value in {weights}.items()}}"
    code = "" if safe else " (which runs code of the file: only of a source that you trust)"
    return f"Load its weights into the module, model.load_state_dict({weights}), and give fit the module{code}."


def _is_safe(name: str) -> bool:
    module, _, cls = name.rpartition(".")
    return module in _SAFE and (_SAFE[module] is None or cls in (_SAFE[module] or ()))


@attrs.define
class _Pickle:
    """What is in a pickle, as far as it can be read.

    Attributes:
        texts: in their order.
        called: the full names of classes and functions.
        of_torch: whether torch.save wrote it.
    """

    texts: list[str] = attrs.field(factory=list)
    called: list[str] = attrs.field(factory=list)
    of_torch: bool = True

    @classmethod
    def read(cls, file: BinaryIO) -> _Pickle:
        """That of a zip file of torch.save; of a file from before those; or another one."""
        result = cls()
        # What was read until an error is all that there is to say.
        with contextlib.suppress(*_UNREADABLE):
            file.seek(0)
            if file.read(2) == b"PK":
                with zipfile.ZipFile(file) as archive:
                    name = next((name for name in archive.namelist() if name.endswith("data.pkl")), "")
                    with archive.open(name) as member:
                        result.add(io.BytesIO(member.read(_MOST)))
                return result
            file.seek(0)
            data = io.BytesIO(file.read(_MOST))
            result.of_torch = data.getvalue()[2:14] == _MAGIC
            for _ in range(3 if result.of_torch else 0):  # that number, the version, and what the machine was
                for _ in pickletools.genops(data):
                    pass
            result.add(data)
        return result

    def add(self, data: BinaryIO) -> None:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name == "GLOBAL":
                self.called.append(str(argument).replace(" ", "."))
            elif operation.name == "STACK_GLOBAL":
                self.called.append(".".join(self.texts[-2:]))
            elif isinstance(argument, str):
                self.texts.append(argument)

"""Names that lead to a checkpoint of the folder: links, or small files where there are no links."""

from __future__ import annotations

from collections.abc import Callable

from pure_loop._internal.logs import get_logger
from pure_loop.checkpoint.storage import storage_of
from pure_loop.errors import ArgumentError, CheckpointError, CheckpointWriteError

__all__ = ["Pointer"]

_log = get_logger("pure_loop.checkpoint")

# No name of a file is longer, in bytes.
_LONGEST = 255


class Pointer:
    """A name that leads to one of the checkpoints beside it.

    Args:
        path: of the link.
        argument: of ``CheckpointSaver``, for errors: ``"latest"``.
        is_checkpoint: whether a name is that of a checkpoint of the run.
        is_file: whether a file that holds the name takes the place of a link where there are none.
    """

    def __init__(self, path: str, argument: str, is_checkpoint: Callable[[str], bool], *, is_file: bool) -> None:
        self._path = path
        self._argument = argument
        self._is_checkpoint = is_checkpoint
        self._is_file = is_file
        self._links = False
        self._target: str | None = None

    def open(self, probe: str) -> None:
        """Try a link to nothing, before training.

        Args:
            probe: where the link is tried.

        Raises:
            ArgumentError: at the path there is something else.
        """
        self._target = None
        where = storage_of(self._path)
        if where.exists() and not where.is_link() and not self._is_own_file():
            raise ArgumentError(
                f"{self._argument}={_name_of(self._path)!r}: {where.path} is no link, and stays as it is; give another "
                "name, or None for no link."
            )
        link = storage_of(probe)
        try:
            link.link_to(_name_of(self._path))
            self._links = link.is_link()
            link.remove()
        except CheckpointWriteError as error:
            self._links = False
            if not self._is_file:
                _log.warning("there is no link %s, for its folder can't have links: %s", self._path, error)

    def lead_to(self, name: str) -> None:
        """Lead to a checkpoint from now on.

        Raises:
            CheckpointWriteError: the link or the file can't be written.
        """
        if name == self._target:
            return
        if self._links:
            storage_of(self._path).link_to(name)
        elif self._is_file:
            with storage_of(self._path).writing() as file:
                file.write(f"{name}\n".encode())
        self._target = name

    def _is_own_file(self) -> bool:
        if not self._is_file:
            return False
        try:
            with storage_of(self._path).open() as file:
                content = file.read(_LONGEST + 2)
            return content.endswith(b"\n") and self._is_checkpoint(content.decode().removesuffix("\n"))
        except (CheckpointError, OSError, UnicodeDecodeError):
            return False


def _name_of(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]

"""A terminal of so many columns: what a person sees after these characters were written to it."""

from __future__ import annotations

import re

__all__ = ["Emulator"]

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|([\r\n\b])|([^\x1b\r\n\b])")


class Emulator:
    """Wraps as xterm does: the character after a full row goes to the next row."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0

    def feed(self, text: str) -> Emulator:
        for parameters, command, control, character in _TOKEN.findall(text):
            if character:
                self._put(character)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._next_row()
            elif control == "\b":
                self.column = max(self.column - 1, 0)
            else:
                self._command(command, parameters)
        return self

    @property
    def lines(self) -> list[str]:
        """The rows, without empty ones at the end."""
        return "\n".join("".join(row).rstrip() for row in self.rows).rstrip("\n").split("\n")

    def _put(self, character: str) -> None:
        if self.column == self.columns:
            self._next_row()
        row = self.rows[self.row]
        row.extend(" " * (self.column + 1 - len(row)))
        row[self.column] = character
        self.column += 1

    def _next_row(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append([])

    def _command(self, command: str, parameters: str) -> None:
        number = int(parameters) if parameters.isdigit() else 1
        if command == "A":
            self.row = max(self.row - number, 0)
        elif command == "K":
            if parameters == "2":
                self.rows[self.row] = []
            else:
                del self.rows[self.row][self.column :]
        elif command not in ("m", "h", "l"):  # colors, and the cursor's visibility
            raise NotImplementedError(f"ESC [ {parameters} {command}")

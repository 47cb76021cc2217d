"""What a terminal shows in the end: `screen.py COLUMNS STOP REFRAIN ARGUMENTS...`, with the program's exit status as its own.

Ctrl-C is sent once the regular expression STOP is found in what came; an empty one sends none. A row that the terminal
itself broke, since a line is wider, ends with ⏎."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

columns, stop, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]


class Screen:
    """The rows that text and the sequences of progress bars leave; nothing scrolls out."""

    def __init__(self):
        self.rows, self.broken, self.row, self.column = [[]], {}, 0, 0

    def down(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    def put(self, character):
        if self.column == columns:
            self.broken[self.row] = True
            self.down()
            self.column = 0
        row = self.rows[self.row]
        row.extend(" " * (self.column + 1 - len(row)))
        row[self.column] = character
        self.column += 1

    def feed(self, text):
        for number, letter, character in re.findall(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])", text):
            if character == "\n":
                self.down()
            elif character == "\r":
                self.column = 0
            elif character:
                self.put(character)
            elif letter == "A":
                self.row = max(0, self.row - int(number or 1))
            elif letter == "B":
                for _ in range(int(number or 1)):
                    self.down()
            elif letter == "K":
                del self.rows[self.row][0 if number == "2" else self.column :]
                self.broken.pop(self.row, None)

    def text(self):
        rows = ["".join(row).rstrip() + "⏎" * self.broken.get(index, False) for index, row in enumerate(self.rows)]
        return "\n".join(rows).rstrip() + "\n"


child, terminal = pty.fork()
if child == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    os.environ.update(TERM="xterm", NO_COLOR="1")
    os.execvp(command[0], command)
came = b""
while True:
    try:
        part = os.read(terminal, 65536)
    except OSError:
        break
    if not part:
        break
    came += part
    if stop and re.search(stop, came.decode(errors="replace")):
        os.write(terminal, b"\x03")
        stop = ""
screen = Screen()
screen.feed(came.decode(errors="replace"))
print(screen.text(), end="")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)

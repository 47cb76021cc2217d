"""A person at `refrain chat`: edits lines, brings them back, stops an answer and a prefill, and leaves.

`chat.py LARGE_DOCUMENT FILE_FOR_ANSWERS REFRAIN ARGUMENTS...`"""

import os
import pty
import re
import select
import shlex
import sys
import time

PROMPT = "> "
WAIT = 240


class Terminal:
    def __init__(self, arguments):
        self.text = ""
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            os.environ["TERM"] = "xterm"
            os.environ["NO_COLOR"] = "1"
            os.execvp(arguments[0], arguments)

    def read(self):
        """What came since the last call; None at the end."""
        if not select.select([self.terminal], [], [], 0.1)[0]:
            return ""
        try:
            text = os.read(self.terminal, 65536).decode(errors="replace")
        except OSError:
            return None
        return text or None

    def until(self, there, what):
        """Reads until `there` holds of the text since the last call of `send`."""
        end = time.monotonic() + WAIT
        while not there(self.text):
            text = self.read()
            assert text is not None and time.monotonic() < end, f"{what}: {self.text!r}"
            self.text += text

    def send(self, keys):
        self.text = ""
        os.write(self.terminal, keys.encode())

    def ends(self):
        while self.read() is not None:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def plain(text):
    """Text without what moves the cursor and sets modes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


def prompted(text):
    return plain(text).endswith(PROMPT)


document, answers, *command = sys.argv[1:]
chat = Terminal(command)
chat.until(prompted, "the first prompt")
# The cursor goes back over three words, and a letter is put in.
chat.send("Cout to a hundred, in words.")
chat.until(lambda text: "in words." in plain(text), "a typed line")
chat.send("\x1b[D" * 25 + "n")
chat.until(lambda text: "Count to a hundred" in plain(text), "the edited line")
chat.send("\r")
chat.until(lambda text: len(plain(text).partition("\n")[2]) > 8, "an answer under way")
chat.send("\x03")
chat.until(lambda text: "TPOT" in text or "TTFT" in text, "the statistics of a stopped answer")
chat.until(prompted, "a prompt after a stopped answer")
assert "leaves" not in chat.text, chat.text
# Lines that come together are read one after the other.
chat.send("/search\r/method\r")
chat.until(lambda text: plain(text).count(", 0 documents") == 2 and prompted(text), "both lines' answers")
# The line comes back, and goes.
chat.send("\x1b[A" * 3)
chat.until(lambda text: "Count to a hundred" in plain(text), "the earlier line")
chat.send("\x15/help\r")
chat.until(lambda text: "/method NAME" in text and prompted(text), "the list of commands")
# A prefill stops, and its documents are none of the chat's.
chat.send(f"/docs '{document}'\r")
chat.until(lambda text: re.search(r"\d{3}/\d+ tokens", plain(text)), "a prefill under way")
chat.send("\x03")
chat.until(lambda text: "stopped" in text and prompted(text), "a prompt after a stopped prefill")
chat.send("/docs\r")
chat.until(lambda text: "0 documents" in text and prompted(text), "a chat without documents")


def clear():
    """Types something and clears it."""
    chat.send("Tell")
    chat.until(lambda text: "Tell" in plain(text), "a typed word")
    chat.send("\x03")
    chat.until(prompted, "a cleared line")
    assert "leaves" not in chat.text, chat.text


clear()
clear()
for is_last in [False, True]:
    chat.send("\x03")
    chat.until(lambda text: "another Ctrl-C leaves" in text and prompted(text), "a word on how to leave")
    if not is_last:
        clear()
chat.send("\x03")
assert chat.ends() == 0

# The prompt stands on the terminal where answers go to a file.
chat = Terminal(["sh", "-c", f"exec {shlex.join(command)} --max-tokens 4 > {shlex.quote(answers)}"])
chat.until(prompted, "a prompt beside a file")
chat.send("Why?\r")
chat.until(lambda text: "TTFT" in text and prompted(text), "a prompt after an answer into a file")
chat.send("\x04")
assert chat.ends() == 0
with open(answers) as file:
    text = file.read()
assert text and "\x1b" not in text and PROMPT not in text, text
print("ok")

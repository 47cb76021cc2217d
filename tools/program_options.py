"""The options of `refrain` and `refrain-scale`, read from the structs that clap derives them from."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRUCT = re.compile(r"^pub\(crate\) struct (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^    pub\(crate\) (\w+): (.+),$", re.MULTILINE)
VARIABLE = re.compile(r'\benv = "(\w+)"')
LONG = re.compile(r'\blong = "([\w-]+)"')


def structs(files):
    """The bodies of all structs of these files, by their names."""
    return {name: body for file in files for name, body in STRUCT.findall(file.read_text(encoding="utf-8"))}


def fields(known, name):
    """Names of a struct's options, with their variables where the source names one; those of flattened structs are among them."""
    found, start = {}, 0
    for field in FIELD.finditer(known[name]):
        attributes, start = known[name][start : field.start()], field.end()
        if "#[command(flatten)]" in attributes:
            found.update(fields(known, field[2].split("::")[-1]))
        elif re.search(r"\blong\b", attributes):
            given, variable = LONG.search(attributes), VARIABLE.search(attributes)
            found[given[1] if given else field[1].replace("_", "-")] = variable and variable[1]
    return found


# The structs of commands that packaging calls, with their files.
COMMANDS = {"serve": ("args/serve.rs", "Serve"), "pull": ("args.rs", "Pull"), "job run": ("args/job.rs", "Run")}


def refrain(command):
    """Options of a command of `refrain`, by name: `REFRAIN_…` gives each of them by its name.

    Raises KeyError for a command that is not there."""
    source = ROOT / "crates/cli/src"
    file, struct = COMMANDS[command]
    known = structs([source / "args.rs", *sorted(source.glob("args/*.rs"))])
    names = [*fields(known, "Global"), *fields(known | structs([source / file]), struct)]
    return {name: f"REFRAIN_{name.replace('-', '_').upper()}" for name in names}


def scale(command):
    """Options of a command of `refrain-scale`, with the variables that it reads.

    Raises KeyError for a command that is not there."""
    return fields(structs([ROOT / "scale/src/args.rs"]), command.capitalize())

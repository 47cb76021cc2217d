"""Reads the modules of a Rust crate: what each defines, imports and names.

A small parser for this repository's own sources: comments and strings are blanked, code under
`#[cfg(test)]` is left out, and paths are resolved through re-exports to the file that defines the item.
Macros are read as they are written. Needs nothing but Python.
"""

import re
from dataclasses import dataclass, field

# Comments, strings and characters: blanked, so that what is left is code.
NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(?P<hashes>\#*)".*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\\n])'""",
    re.DOTALL,
)
TEST = re.compile(r"#\s*\[\s*cfg\s*\(\s*(?:test\b|all\s*\(\s*test\b)")
PATH_ATTRIBUTE = re.compile(r'#\[path\s*=\s*"([^"]+)"\]')
# Paths that serde and schemars attributes give as strings.
STRING_PATH = re.compile(
    r"""\b(?:with|serialize_with|deserialize_with|default|skip_serializing_if|schema_with)\s*=\s*"(\w+(?:::\w+)+)\""""
)
TOKEN = re.compile(r"r#\w+|\w+|::|->|=>|\S")
WORD = re.compile(r"(?:r#)?[A-Za-z_]\w*$")

OPEN = {"{": "}", "(": ")", "[": "]"}
CLOSE = set(OPEN.values())
# Keywords that are followed by the name of what they define.
DEFINES = {"fn", "struct", "enum", "trait", "type", "const", "static", "union"}
# Items that end at a semicolon, whatever braces they contain.
ENDS_AT_SEMICOLON = {"use", "const", "static", "type", "let", "extern"}
# Items whose header may hold a comma.
HAS_HEADER = DEFINES | {"impl", "mod", "macro_rules", "unsafe", "async"}


def blank(match):
    """Spaces and line ends in place of a match, so that positions stay."""
    return re.sub(r"[^\n]", " ", match.group())


def module_folder(file, is_root):
    """Where the files of a file's modules lie."""
    return file.parent if is_root or file.name == "mod.rs" else file.with_suffix("")


def module_files(folder, declared_in, name, path_attribute):
    """Where the file of `mod name;` may lie."""
    if path_attribute:
        return [declared_in.parent / path_attribute]
    return [folder / f"{name}.rs", folder / name / "mod.rs"]


@dataclass(eq=False)
class Module:
    """A module, in a file of its own or within braces."""

    file: object
    parent: object = None
    children: dict = field(default_factory=dict)  # name -> Module
    items: dict = field(default_factory=dict)  # name -> keyword that defines it
    uses: list = field(default_factory=list)  # Use
    paths: list = field(default_factory=list)  # (segments, line), paths outside of `use`
    words: set = field(default_factory=set)  # every word of the code

    def root(self):
        return self.parent.root() if self.parent else self

    def descendants(self):
        yield self
        for child in self.children.values():
            yield from child.descendants()


@dataclass
class Use:
    """One leaf of a `use` tree."""

    path: list
    name: str  # what it is called here; "*" for all names
    line: int
    is_public: bool  # `pub use`, `pub(crate) use`


class Parser:
    def __init__(self, file):
        self.file = file
        self.text = file.read_text(encoding="utf-8")
        self.code = NOT_CODE.sub(blank, self.text)
        found = list(TOKEN.finditer(self.code))
        self.tokens = [match.group().removeprefix("r#") for match in found]
        self.starts = [match.start() for match in found]
        self.closing = self.match_brackets()
        self.i = 0

    def match_brackets(self):
        """Index of the closing token for each opening one."""
        closing, open_at = {}, []
        for at, token in enumerate(self.tokens):
            if token in OPEN:
                open_at.append(at)
            elif token in CLOSE and open_at:
                closing[open_at.pop()] = at
        return closing

    def line(self, at):
        return self.code.count("\n", 0, self.starts[at]) + 1

    def token(self, at):
        return self.tokens[at] if at < len(self.tokens) else ""

    def body(self, module, end, folder, at_top):
        """Reads tokens up to `end` into a module. Definitions count where `at_top`, outside of braces."""
        attributes, is_public = "", False
        while self.i < end:
            token = self.tokens[self.i]
            if token == "#" and self.token(self.i + 1) == "[":
                close = self.closing[self.i + 1]
                text = self.text[self.starts[self.i] : self.starts[close] + 1]
                attributes += text
                for match in STRING_PATH.finditer(text):
                    module.paths.append((match[1].split("::"), self.line(self.i)))
                self.i += 1
                self.body(module, close + 1, folder, at_top=False)
                continue
            if TEST.search(attributes):
                self.skip_item(end)
            elif token == "use" and self.token(self.i + 1) != "<":
                self.i += 1
                self.use_tree(module, [], is_public)
            elif token == "mod" and WORD.match(self.token(self.i + 1)) and self.token(self.i + 2) in {";", "{"}:
                self.declaration(module, attributes, folder)
            elif token in OPEN:
                close = self.closing.get(self.i, end)
                self.i += 1
                self.body(module, close, folder, at_top=False)
                self.i = close + 1
            elif token == "pub":
                is_public = True
                self.skip_visibility()
                continue
            elif WORD.match(token):
                self.word(module, at_top)
            else:
                self.i += 1
            attributes, is_public = "", False

    def word(self, module, at_top):
        """A definition, a path or a lone word."""
        token, following = self.tokens[self.i], self.token(self.i + 1)
        module.words.add(token)
        if at_top and token in DEFINES and WORD.match(following) and following not in DEFINES:
            module.items[following] = token
        elif at_top and token == "macro_rules" and following == "!":
            module.items[self.token(self.i + 2)] = token
        if following != "::" or self.token(self.i - 1) == "::":
            self.i += 1
            return
        start, segments = self.i, [token]
        while self.token(self.i + 1) == "::" and WORD.match(self.token(self.i + 2)):
            self.i += 2
            segments.append(self.tokens[self.i])
            module.words.add(self.tokens[self.i])
        self.i += 1
        if len(segments) > 1:
            module.paths.append((segments, self.line(start)))

    def declaration(self, module, attributes, folder):
        name = self.tokens[self.i + 1]
        if self.tokens[self.i + 2] == "{":
            child = module.children[name] = Module(self.file, module)
            close = self.closing[self.i + 2]
            self.i += 3
            self.body(child, close, folder / name, at_top=True)
            self.i = close + 1
            return
        self.i += 3
        at = PATH_ATTRIBUTE.search(attributes)
        for file in module_files(folder, self.file, name, at and at[1]):
            if file.is_file():
                module.children[name] = read(file, module)

    def use_tree(self, module, prefix, is_public):
        """`a::{b, c as d, e::*}` after `use`, or one branch of it; ends behind it."""
        path, start = list(prefix), self.i
        name = None
        while self.i < len(self.tokens):
            token = self.tokens[self.i]
            if token == "{":
                close = self.closing[self.i]
                self.i += 1
                while self.i < close:
                    self.use_tree(module, path, is_public)
                    if self.token(self.i) == ",":
                        self.i += 1
                self.i = close + 1
                return
            if token in {",", "}", ";"}:
                break
            if token == "as":
                self.i += 1
                name = self.tokens[self.i]
            elif token == "*":
                name = "*"
            elif token == "::":
                if self.i == start and not prefix:
                    path = ["::"]
            elif not (token == "self" and path):
                path.append(token)
            self.i += 1
        if path:
            module.uses.append(Use(path, name or path[-1], self.line(start), is_public))

    def skip_visibility(self):
        """Goes behind `pub` or `pub(crate)`."""
        self.i += 1
        if self.token(self.i) == "(" and (self.token(self.i + 1) == "in" or self.token(self.i + 2) == ")"):
            self.i = self.closing[self.i] + 1

    def skip_item(self, end):
        """Goes behind the item, field, arm or statement that starts here."""
        word = self.tokens[self.i]
        if word == "const" and self.token(self.i + 1) == "fn":
            word = "fn"
        while self.i < end:
            token = self.tokens[self.i]
            if token == "#" and self.token(self.i + 1) == "[":
                self.i = self.closing[self.i + 1] + 1
                word = self.token(self.i)
                continue
            if token == "pub":
                self.skip_visibility()
                word = self.token(self.i)
                continue
            if token == ";" or (token == "," and word not in HAS_HEADER):
                self.i += 1
                return
            if token in OPEN:
                self.i = self.closing.get(self.i, end)
                if token == "{" and word not in ENDS_AT_SEMICOLON:
                    self.i += 1
                    return
            self.i += 1


def read(file, parent=None):
    """The module of a file with all that it declares, tests left out."""
    parser = Parser(file)
    module = Module(file, parent)
    parser.body(module, len(parser.tokens), module_folder(file, parent is None), at_top=True)
    return module


def find(module, path, seen=frozenset()):
    """What a path leads to from a module: a Module, or (Module, name) for an item; empty for other crates'."""
    if not path or path[0] == "::":
        return []
    here, rest, is_first = module, list(path), True
    while rest and rest[0] in {"crate", "self", "super"}:
        here = here.root() if rest[0] == "crate" else here.parent if rest[0] == "super" else here
        rest, is_first = rest[1:], False
        if here is None:
            return []
    if not rest:
        return [here]
    found = lookup(here, rest[0], len(rest) == 1, seen)
    if not found:
        # A name that is neither defined nor imported comes from a macro of this module.
        is_foreign = is_first or any(use.name == rest[0] for use in here.uses)
        return [] if is_foreign else [(here, rest[0])]
    reached = []
    for place in found:
        if isinstance(place, Module) and len(rest) > 1:
            reached += find(place, ["self", *rest[1:]], seen)
        else:
            reached.append(place)
    return reached


def lookup(module, name, is_last, seen):
    """What a name stands for in a module."""
    if (module, name) in seen:
        return []
    seen = seen | {(module, name)}
    child = module.children.get(name)
    if child and not is_last:
        return [child]
    found = [(module, name)] if name in module.items else []
    for use in module.uses:
        if use.name == name:
            found += find(module, use.path, seen)
    if not found and not child:
        for use in module.uses:
            if use.name == "*":
                for place in find(module, use.path, seen):
                    if isinstance(place, Module) and place is not module:
                        found += lookup(place, name, is_last, seen)
    items = [place for place in found if not isinstance(place, Module)]
    return items or found or ([child] if child else [])


def names(module, seen=frozenset()):
    """Every name that `use module::*` may bring."""
    if module in seen:
        return set()
    found = set(module.items) | set(module.children)
    for use in module.uses:
        if use.name != "*":
            found.add(use.name)
            continue
        for place in find(module, use.path):
            if isinstance(place, Module):
                found |= names(place, seen | {module})
    return found


def imports(module):
    """What one module takes from others: (file, line, path as written).

    A name that is only re-exported is not taken: the module's own code does without it.
    """
    heads = {segments[0] for segments, _ in module.paths}
    for use in module.uses:
        if use.is_public and use.name != "*" and use.name not in module.words:
            continue
        written = "::".join(use.path) + ("::*" if use.name == "*" else "")
        for place in find(module, use.path):
            if not isinstance(place, Module):
                yield place[0].file, use.line, written
            elif use.name == "*":
                for name in sorted(names(place)):
                    for item in lookup(place, name, True, frozenset()):
                        is_item = not isinstance(item, Module)
                        is_trait = is_item and item[0].items.get(item[1]) == "trait"
                        if name in module.words or is_trait:
                            yield (item[0] if is_item else item).file, use.line, f"{written}, {name}"
            elif use.name not in heads:
                # Paths through an imported module are followed to what they name.
                yield place.file, use.line, written
    for segments, line in module.paths:
        for place in find(module, segments):
            yield (place if isinstance(place, Module) else place[0]).file, line, "::".join(segments)


def import_graph(root):
    """file -> {imported file: (line, path as written)}, the first import of each, for a crate's root module."""
    graph = {}
    for module in root.descendants():
        edges = graph.setdefault(module.file, {})
        for file, line, written in imports(module):
            if file != module.file and (file not in edges or line < edges[file][0]):
                edges[file] = (line, written)
    return graph


def circles(graph):
    """The shortest circle through each import that lies on one, each once, shorter ones first."""
    found = {}
    for start in graph:
        for target in graph[start]:
            way = shortest_way(graph, target, start)
            if way:
                circle = way[-1:] + way[:-1]
                first = circle.index(min(circle))
                circle = tuple(circle[first:] + circle[:first])
                found[circle] = None
    return sorted(found, key=lambda circle: (len(circle), circle))


def shortest_way(graph, start, end):
    """Files from `start` to `end`, both included; None where there is no way."""
    came_from, queue = {start: None}, [start]
    for file in queue:
        if file == end:
            way = []
            while file is not None:
                way.append(file)
                file = came_from[file]
            return way[::-1]
        for target in sorted(graph.get(file, {})):
            if target not in came_from:
                came_from[target] = file
                queue.append(target)
    return None

"""Answers from documents whose KV caches are kept and reused."""

from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from typing import Any, TypedDict, Unpack, final, type_check_only

__all__ = [
    "Answer",
    "Chunk",
    "Document",
    "Engine",
    "ModelNotFound",
    "RefrainError",
    "Token",
    "TokenStream",
    "__version__",
    "methods",
    "models",
    "policies",
    "read",
]

__version__: str

class RefrainError(Exception):
    """An error of opening a model, of ingesting or of answering."""

class ModelNotFound(RefrainError):
    """A model that is not there: unknown, or not fetched yet."""

@final
class Document:
    """A document: its title, which may be empty, and its text."""

    def __new__(cls, text: str, title: str = "") -> Document: ...
    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Chunk:
    """A chunk of a kept document. It stands in a question's documents as it was prefilled."""

    @property
    def text(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def document(self) -> str: ...
    @property
    def part(self) -> int: ...
    @property
    def of(self) -> int: ...
    @property
    def score(self) -> float | None: ...
    def __len__(self) -> int: ...

@type_check_only
class _Keywords(TypedDict, total=False):
    """Keywords of an answer."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    stop: str | list[str]
    json_schema: dict[str, Any]
    regex: str
    choice: list[str]
    history: list[dict[str, str]]
    thinking: bool
    speculative_tokens: int
    ignore_eos: bool

@final
class Answer:
    """An answer."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def stats(self) -> dict[str, Any]: ...
    def __str__(self) -> str: ...

@final
class Token:
    """A token of a stream, or the text that was held back until the end."""

    @property
    def text(self) -> str: ...
    @property
    def id(self) -> int | None: ...

@final
class TokenStream(Iterator[Token]):
    """An answer on its way: an iterator over its tokens, each computed when it is asked for."""

    def __iter__(self) -> TokenStream: ...
    def __next__(self) -> Token: ...
    @property
    def answer(self) -> Answer | None: ...

@final
class Engine:
    """A model with its chunk store. It may be shared between threads."""

    def __new__(
        cls,
        model: str | PathLike[str],
        store: str | PathLike[str] | None = None,
        *,
        method: str = "auto",
        prefix: str | None = None,
        system: str | None = None,
        device: str = "cpu",
        threads: int = 0,
        memory: int = 1073741824,
        disk: int | None = None,
        chunk_tokens: int | None = None,
        models: str | PathLike[str] | None = None,
    ) -> Engine: ...
    def ingest(
        self,
        documents: Iterable[Document | str],
        *,
        method: str | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]: ...
    def search(self, question: str, limit: int = 5, *, method: str | None = None) -> list[Chunk]: ...
    def documents(self) -> list[dict[str, Any]]: ...
    def remove(self, document: str) -> None: ...
    def chunks(self, document: str, parts: list[int] | None = None) -> list[Chunk]: ...
    def ask(
        self,
        question: str,
        documents: Iterable[Document | Chunk | str] | None = None,
        *,
        method: str | None = None,
        evict: str | None = None,
        system: str | None = None,
        **sampling: Unpack[_Keywords],
    ) -> Answer: ...
    def stream(
        self,
        question: str,
        documents: Iterable[Document | Chunk | str] | None = None,
        *,
        method: str | None = None,
        evict: str | None = None,
        system: str | None = None,
        **sampling: Unpack[_Keywords],
    ) -> TokenStream: ...
    def generate(
        self,
        prompt: str,
        documents: Iterable[Document | Chunk | str] | None = None,
        *,
        method: str | None = None,
        evict: str | None = None,
        system: str | None = None,
        **sampling: Unpack[_Keywords],
    ) -> Answer: ...
    def compare(
        self,
        question: str,
        documents: Iterable[Document | Chunk | str],
        methods: list[str],
        *,
        evict: str | None = None,
        system: str | None = None,
        tokens: int = 32,
    ) -> list[dict[str, Any]]: ...
    @property
    def context(self) -> int: ...
    def count_tokens(self, text: str) -> int: ...

def read(path: str | PathLike[str]) -> list[Document]:
    """The documents of a file or folder."""

def models() -> list[dict[str, Any]]:
    """The models that are known by name."""

def methods() -> list[dict[str, Any]]:
    """The fusion methods with their options."""

def policies() -> list[dict[str, Any]]:
    """The eviction policies with their options."""

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
    "TokenLogprobs",
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
    def __hash__(self) -> int: ...
    def __getnewargs__(self) -> tuple[str, str]:
        """The arguments that make it again, for copies and pickles."""

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
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __copy__(self) -> Chunk:
        """A chunk never changes."""
    def __deepcopy__(self, _memo: Any) -> Chunk:
        """A chunk never changes."""

@type_check_only
class _Keywords(TypedDict, total=False):
    """Keywords of an answer. None stands for the default, and at most one of the last five is given."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: dict[int, float] | None
    logprobs: int | None
    seed: int | None
    stop: str | list[str] | None
    history: list[dict[str, str]] | None
    thinking: bool | None
    speculative_tokens: int | None
    ignore_eos: bool | None
    json_object: bool | None
    json_schema: dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None

@final
class TokenLogprobs:
    """Log probabilities of a token, before temperature and all other sampling options."""

    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Answer:
    """An answer."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log probabilities of its tokens, but for the one that ended it; empty unless `logprobs` asked for them."""
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
    @property
    def logprobs(self) -> TokenLogprobs | None:
        """Its log probabilities, if `logprobs` asked for them."""

@final
class TokenStream(Iterator[Token]):
    """An answer on its way: an iterator over its tokens, each computed when it is asked for."""

    def __iter__(self) -> TokenStream: ...
    def __next__(self) -> Token: ...
    @property
    def answer(self) -> Answer | None:
        """The answer with its statistics, once the iterator has ended; none before."""
    def close(self) -> None:
        """Ends the work and frees its memory; the iterator has ended then."""

@final
class Engine:
    """A model with its chunk store. It may be shared between threads.

    model: a known name, a GGUF file, a folder of Hugging Face, or `hf:ORG/NAME[:FILE]`.
    store: folder of stored chunks; else the program's own.
    method: method of questions that name none; `auto` is the one that is safe for the model.
    prefix: `none`, `bos`, `system`, `averaged` or `text:FILE`; else the one that is safe for the model.
    system: system message of the prompts to come.
    device: `cpu`, `cuda` (an NVIDIA GPU; `cuda:1` is the second; experimental), or `auto`.
    threads: 0 for one a core.
    memory, disk: most bytes of chunks in memory and in the folder.
    models: folder of models that are known by name.
    prefix_cache: most bytes of keys and values of prompts and answers that are kept for prompts that begin alike, as turns of a conversation do.
    remote: object store by which machines share chunks and documents: `s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`; its
    keys come from the environment.

    `close`, or the end of a `with` block, frees model and store.
    """

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
        prefix_cache: int = 0,
        remote: str | None = None,
    ) -> Engine: ...
    def close(self) -> None:
        """Closes the engine: model, store and kept documents are free once the work that is under way has ended."""
    def __enter__(self) -> Engine: ...
    def __exit__(self, *_error: object) -> None: ...
    def ingest(
        self,
        documents: Iterable[Document | str],
        *,
        method: str | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]:
        """Prefills documents, and keeps them and their chunks. What is there already is not computed again.

        progress: is called with tokens computed and tokens to compute.
        Returns counts, bytes and seconds.
        """
    def search(self, question: str, limit: int = 5, *, method: str | None = None) -> list[Chunk]:
        """The chunks of ingested documents whose words fit a question best, those of one document together. They can stand in the documents of
        `ask`, `stream`, `generate` and `compare`, where they are reused as they were prefilled.

        limit: most chunks.
        method: the method that is going to answer. For those that need whole documents, all chunks of the documents come.
        """
    def documents(self) -> list[dict[str, Any]]:
        """The ingested documents that searches find, by their ids: `id`, `title`, `created` (seconds since 1970), `bytes`, `tokens`, `chunks`."""
    def remove(self, document: str) -> None:
        """Removes an ingested document by its id, with its chunks that no other document has."""
    def chunks(self, document: str, parts: list[int] | None = None) -> list[Chunk]:
        """The chunks of an ingested document by its id, as a search gives it: all, or those of some `parts`."""
    def ask(
        self,
        question: str,
        documents: Iterable[Document | Chunk | str] | None = None,
        *,
        method: str | None = None,
        evict: str | None = None,
        system: str | None = None,
        **sampling: Unpack[_Keywords],
    ) -> Answer:
        """Answers a question over documents.

        method: fusion method with its options, as `a3:ratio=0.15`; else the engine's.
        evict: eviction policy with its options, as `morph_kv:capacity=600`; else full attention.
        """
    def stream(
        self,
        question: str,
        documents: Iterable[Document | Chunk | str] | None = None,
        *,
        method: str | None = None,
        evict: str | None = None,
        system: str | None = None,
        **sampling: Unpack[_Keywords],
    ) -> TokenStream:
        """`ask`, token by token. Chunks that the store lacks are prefilled when the first token is asked for."""
    def generate(
        self,
        prompt: str,
        documents: Iterable[Document | Chunk | str] | None = None,
        *,
        method: str | None = None,
        evict: str | None = None,
        system: str | None = None,
        **sampling: Unpack[_Keywords],
    ) -> Answer:
        """Answers a text as it is, with documents before it if there are any: for long answers. The keywords are those of `ask`."""
    def compare(
        self,
        question: str,
        documents: Iterable[Document | Chunk | str],
        methods: list[str],
        *,
        evict: str | None = None,
        system: str | None = None,
        tokens: int = 32,
    ) -> list[dict[str, Any]]:
        """Methods side by side: time to the first token, and how far each token's distribution is from vanilla's over the first `tokens`
        tokens of vanilla's answer. Ctrl-C ends it after vanilla's answer or a method.
        """
    @property
    def context(self) -> int:
        """Positions that the model was trained for."""
    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text."""
    def encode(self, text: str) -> list[int]:
        """The token ids of a text. Special tokens that are written in it are ordinary characters."""
    def decode(self, tokens: list[int]) -> str:
        """The text of token ids."""

def read(path: str | PathLike[str]) -> list[Document]:
    """The documents of a file or folder."""

def models() -> list[dict[str, Any]]:
    """The models that are known by name."""

def methods() -> list[dict[str, Any]]:
    """The fusion methods with their options."""

def policies() -> list[dict[str, Any]]:
    """The eviction policies with their options."""

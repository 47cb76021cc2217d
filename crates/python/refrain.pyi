"""Answers from documents whose KV caches are kept and reused."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict, final, type_check_only

from typing_extensions import Unpack

__all__ = [
    "Answer",
    "Chunk",
    "Document",
    "Engine",
    "ModelNotFound",
    "PromptTooLong",
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

class PromptTooLong(RefrainError):
    """A prompt that does not fit the model's context with its answer: `prompt_tokens` and `max_tokens` are more than `context`."""

    prompt_tokens: int
    max_tokens: int
    context: int

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
    """256"""
    min_tokens: int | None
    """0"""
    temperature: float | None
    """0, which takes the likeliest token"""
    top_k: int | None
    """0, which keeps all tokens, as -1 does"""
    top_p: float | None
    """1, which keeps all tokens; 0 keeps one"""
    min_p: float | None
    """0"""
    repetition_penalty: float | None
    """1"""
    frequency_penalty: float | None
    """0"""
    presence_penalty: float | None
    """0"""
    logit_bias: dict[int, float] | None
    logprobs: int | None
    seed: int | None
    """drawn, as with -1, where temperature is above 0; `Answer.seed` tells it"""
    stop: str | Sequence[str] | None
    history: Iterable[Mapping[str, str]] | None
    thinking: bool | None
    """False"""
    speculative_tokens: int | None
    """0"""
    ignore_eos: bool | None
    """False"""
    json_object: bool | None
    json_schema: dict[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None

@final
class TokenLogprobs:
    """Log probabilities of a token, before temperature and all other sampling options."""

    def __new__(cls, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprobs: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __getnewargs__(self) -> tuple[float, list[tuple[int, float]]]:
        """The arguments that make it again, for copies and pickles."""

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
    @property
    def seed(self) -> int | None:
        """The seed with which its tokens were drawn; none of a greedy answer. Asked with this seed again, a question has this answer."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]:
        """The function and the arguments that make it again, for copies and pickles."""
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
    """An answer on its way: an iterator over its tokens, each computed when it is asked for. `close`, or the end of a `with` block, ends the work."""

    def __iter__(self) -> TokenStream: ...
    def __next__(self) -> Token: ...
    @property
    def answer(self) -> Answer | None:
        """The answer with its statistics, once the iterator has ended; none before."""
    def close(self) -> None:
        """Ends the work and frees its memory; the iterator has ended then."""
    def __enter__(self) -> TokenStream: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Engine:
    """A model with its chunk store. It may be shared between threads, but not with a process that is forked from this one.

    model: a known name, a GGUF file, a folder of Hugging Face, or `hf:ORG/NAME[:FILE]`.
    store: folder of stored chunks; else `REFRAIN_STORE`, or the program's own.
    method: method of questions that name none; `auto` is the one that is safe for the model.
    prefix: `none`, `bos`, `system`, `averaged` or `text:FILE`; else the one that is safe for the model.
    system: system message of the prompts to come.
    device: `cpu`, `cuda` (an NVIDIA GPU; `cuda:1` is the second; experimental), or `auto`.
    threads: 0 for one a core.
    memory, disk: most bytes of chunks in memory (1 GiB) and in the folder (no bound).
    chunk_tokens: most tokens of a chunk (512).
    store_dtype: type of stored keys and values: `exact` (as computed), `q8` (8 bits an element) or `q4` (4 bits, KIVI).
    models: folder of models that are known by name; else `REFRAIN_MODELS`, or `~/.cache/refrain/models`.
    prefix_cache: most bytes of keys and values of prompts and answers that are kept for prompts that begin alike, as turns of a conversation do; 0 keeps none.
    remote: object store by which machines share chunks and documents: `s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`; its
    keys come from the environment.
    keep_packed: whether packed weights are kept in a file beside the model, as large as they are in memory, from which later engines and the program
    read them.

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
        keep_packed: bool = True,
        store_dtype: str = "exact",
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

        documents: `Document` or `str` each; those without text are left out.
        method: the method whose statistics of whole documents are kept, too, if it needs some; else the engine's.
        progress: is called with tokens computed and tokens to compute, some times a second at most.
        Returns counts, bytes and seconds. `not_stored` is the reason why chunks are not in the store's folder, and `unpublished` the number of
        documents that are not in the object store yet; both are told as warnings of Python, too.
        """
    def flush(self, timeout: float | None = None) -> None:
        """Waits until all chunks and documents that were ingested are in the object store of `remote`, and takes up what other machines have changed.
        Without one, there is nothing to wait for.

        timeout: most seconds; None waits as long as the object store takes something.
        Raises TimeoutError once the time is over, and RefrainError if the object store does not answer, or refuses. What is not uploaded then is
        uploaded later, also by another engine that has the store's folder open.
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
    def chunks(self, document: str, parts: Sequence[int] | None = None) -> list[Chunk]:
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
        system: system message; else the engine's.
        Answers have 256 tokens at most and are greedy unless `max_tokens` and `temperature` say otherwise. Raises PromptTooLong if the prompt does not
        fit the context with the answer.
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
        methods: Sequence[str],
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
    @property
    def fingerprint(self) -> str:
        """Names the model's weights, configuration and precision: equal models have equal ones, on every machine."""
    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text."""
    def encode(self, text: str) -> list[int]:
        """The token ids of a text. Special tokens that are written in it are ordinary characters."""
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""

def read(path: str | PathLike[str]) -> list[Document]:
    """The documents of a file or folder. Files of a folder that cannot be read are told as warnings of Python; a file given by name that cannot be
    read raises OSError or RefrainError.
    """

def models() -> list[dict[str, Any]]:
    """The models that are known by name."""

def methods() -> list[dict[str, Any]]:
    """The fusion methods with their options."""

def policies() -> list[dict[str, Any]]:
    """The eviction policies with their options."""

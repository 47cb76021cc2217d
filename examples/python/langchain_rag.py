"""Refrain in LangChain: a retriever over the kept chunks, and a chat model that reuses their KV caches.

    pip install langchain-core
    python examples/python/langchain_rag.py examples/docs/drive "How far does a waxed chain run between treatments?"
"""

import argparse
from collections.abc import Iterator
from typing import Any

import refrain
from langchain_core.callbacks import CallbackManagerForLLMRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda

ROLES = {"human": "user", "ai": "assistant", "system": "system"}


def cost(answer: refrain.Answer) -> dict[str, Any]:
    """What an answer cost, as messages hold it."""
    stats = answer.stats
    usage = {
        "input_tokens": stats["prompt_tokens"],
        "output_tokens": stats["answer_tokens"],
        "total_tokens": stats["prompt_tokens"] + stats["answer_tokens"],
        "input_token_details": {"cache_read": stats["cached_tokens"] - stats["prefilled_tokens"]},
    }
    return {"response_metadata": stats, "usage_metadata": usage}


class RefrainRetriever(BaseRetriever):
    """The chunks whose words fit a question best. Their metadata says where they stand, so that the chat model finds their KV caches."""

    engine: Any
    limit: int = 5

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [
            Document(
                chunk.text,
                metadata={"title": chunk.title, "document": chunk.document, "part": chunk.part, "score": chunk.score},
            )
            for chunk in self.engine.search(query, self.limit)
        ]


class ChatRefrain(BaseChatModel):
    """A chat model that takes documents beside the messages: `invoke(messages, documents=…)`, or `bind(documents=…)`. Further keywords of either
    are those of `Engine.ask`."""

    engine: Any
    method: str | None = None
    max_tokens: int = 256

    @property
    def _llm_type(self) -> str:
        return "refrain"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What answers depend on, for caches. An engine's own method and system message are known by its id."""
        return {
            "model": self.engine.fingerprint,
            "engine": id(self.engine),
            "method": self.method,
            "max_tokens": self.max_tokens,
        }

    def _tokens(
        self, messages: list[BaseMessage], documents: list[Document], stop: list[str] | None, keywords: dict[str, Any]
    ) -> refrain.TokenStream:
        for message in messages:
            if message.type not in ROLES:
                raise ValueError(f"a message of type '{message.type}' is no text of a user, the model or the system: leave it out")
        *before, last = messages
        if last.type != "human":
            raise ValueError(f"the last message is of type '{last.type}': end with the user's, which is the question")
        system = "\n\n".join(message.text for message in before if message.type == "system")
        history = [
            {"role": ROLES[message.type], "content": message.text} for message in before if message.type != "system"
        ]
        options = {"method": self.method, "max_tokens": self.max_tokens, **keywords}
        return self.engine.stream(
            last.text,
            [self._chunk(document) for document in documents],
            system=system or None,
            history=history,
            stop=stop,
            **options,
        )

    def _chunk(self, document: Document) -> refrain.Chunk | refrain.Document:
        kept = document.metadata
        if "document" in kept and "part" in kept:
            return self.engine.chunks(kept["document"], [kept["part"]])[0]
        return refrain.Document(document.page_content, title=kept.get("title", ""))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        documents: list[Document] = (),
        **keywords: Any,
    ) -> Iterator[ChatGenerationChunk]:
        tokens = self._tokens(messages, documents, stop, keywords)
        for token in tokens:
            if token.text:
                chunk = ChatGenerationChunk(message=AIMessageChunk(token.text))
                if run_manager:
                    run_manager.on_llm_new_token(token.text, chunk=chunk)
                yield chunk
        # The last chunk has no text, and what the answer cost.
        yield ChatGenerationChunk(message=AIMessageChunk("", **cost(tokens.answer)))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        documents: list[Document] = (),
        **keywords: Any,
    ) -> ChatResult:
        tokens = self._tokens(messages, documents, stop, keywords)
        for _token in tokens:
            pass
        answer = tokens.answer
        message = AIMessage(answer.text, **cost(answer))
        return ChatResult(generations=[ChatGeneration(message=message)])


def chain(engine: refrain.Engine, **options: Any) -> RunnableLambda:
    """A chain from a question to its answer: search, then chat over what was found."""
    retriever, chat = RefrainRetriever(engine=engine), ChatRefrain(engine=engine, **options)
    return RunnableLambda(lambda question: chat.bind(documents=retriever.invoke(question)).invoke(question))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", help="file or folder of documents")
    parser.add_argument("question")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--store", help="folder of the kept chunks")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    engine = refrain.Engine(args.model, args.store)
    engine.ingest(refrain.read(args.files))
    answer = chain(engine, max_tokens=args.max_tokens).invoke(args.question)
    stats = answer.response_metadata
    print(answer.text)
    reused = stats["cached_tokens"] - stats["prefilled_tokens"]
    print(f"{reused} of {stats['prompt_tokens']} tokens reused, first token after {stats['ttft']:.2f} s")


if __name__ == "__main__":
    main()

"""Refrain in Haystack: a retriever over the kept chunks, and a generator that reuses their KV caches, in one pipeline.

    pip install haystack-ai
    python examples/python/haystack_rag.py examples/docs/drive "How far does a waxed chain run between treatments?"
"""

import argparse
from typing import Any

import refrain
from haystack import Document, Pipeline, component
from haystack.dataclasses import StreamingChunk


@component
class RefrainRetriever:
    """The chunks whose words fit a question best. Their meta says where they stand, so that the generator finds their KV caches."""

    def __init__(self, engine: refrain.Engine, top_k: int = 5) -> None:
        self.engine, self.top_k = engine, top_k

    @component.output_types(documents=list[Document])
    def run(self, query: str) -> dict[str, list[Document]]:
        found = [
            Document(
                id=f"{chunk.document}/{chunk.part}",
                content=chunk.text,
                meta={"title": chunk.title, "document": chunk.document, "part": chunk.part},
                score=chunk.score,
            )
            for chunk in self.engine.search(query, self.top_k)
        ]
        return {"documents": found}


@component
class RefrainGenerator:
    """Answers a question over documents. `keywords` are those of `Engine.ask`."""

    def __init__(self, engine: refrain.Engine, streaming_callback: Any = None, **keywords: Any) -> None:
        self.engine, self.streaming_callback, self.keywords = engine, streaming_callback, keywords

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    def run(self, query: str, documents: list[Document]) -> dict[str, list[Any]]:
        tokens = self.engine.stream(query, [self._chunk(document) for document in documents], **self.keywords)
        for token in tokens:
            if self.streaming_callback and token.text:
                self.streaming_callback(StreamingChunk(token.text))
        return {"replies": [tokens.answer.text], "meta": [tokens.answer.stats]}

    def _chunk(self, document: Document) -> refrain.Chunk | refrain.Document:
        kept = document.meta
        if "document" in kept and "part" in kept:
            return self.engine.chunks(kept["document"], [kept["part"]])[0]
        return refrain.Document(document.content, title=kept.get("title", ""))


def pipeline(engine: refrain.Engine, **keywords: Any) -> Pipeline:
    """A pipeline from a question to its answer."""
    built = Pipeline()
    built.add_component("retriever", RefrainRetriever(engine))
    built.add_component("generator", RefrainGenerator(engine, **keywords))
    built.connect("retriever.documents", "generator.documents")
    return built


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
    asked = {"retriever": {"query": args.question}, "generator": {"query": args.question}}
    answer = pipeline(engine, max_tokens=args.max_tokens).run(asked)["generator"]
    stats = answer["meta"][0]
    print(answer["replies"][0])
    reused = stats["cached_tokens"] - stats["prefilled_tokens"]
    print(f"{reused} of {stats['prompt_tokens']} tokens reused, first token after {stats['ttft']:.2f} s")


if __name__ == "__main__":
    main()

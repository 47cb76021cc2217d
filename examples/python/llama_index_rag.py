"""Refrain in LlamaIndex: a retriever over the kept chunks, and a query engine that reuses their KV caches.

    pip install llama-index-core
    python examples/python/llama_index_rag.py examples/docs/drive "How far does a waxed chain run between treatments?"
"""

import argparse
import asyncio
from typing import Any

import refrain
from llama_index.core.base.response.schema import Response, StreamingResponse
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode


class RefrainRetriever(BaseRetriever):
    """The chunks whose words fit a question best. Their metadata says where they stand, so that the query engine finds their KV caches."""

    def __init__(self, engine: refrain.Engine, limit: int = 5) -> None:
        super().__init__()
        self.engine, self.limit = engine, limit

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(
                    text=chunk.text,
                    id_=f"{chunk.document}/{chunk.part}",
                    metadata={"title": chunk.title, "document": chunk.document, "part": chunk.part},
                ),
                score=chunk.score,
            )
            for chunk in self.engine.search(query_bundle.query_str, self.limit)
        ]


class RefrainQueryEngine(CustomQueryEngine):
    """Answers over what a retriever finds. `keywords` are those of `Engine.ask`."""

    engine: Any
    retriever: BaseRetriever
    keywords: dict[str, Any] = {}
    streaming: bool = False

    def custom_query(self, query_str: str) -> Response | StreamingResponse:
        nodes = self.retriever.retrieve(query_str)
        chunks = [self._chunk(found.node) for found in nodes]
        if self.streaming:
            tokens = self.engine.stream(query_str, chunks, **self.keywords)
            return StreamingResponse((token.text for token in tokens if token.text), nodes)
        answer = self.engine.ask(query_str, chunks, **self.keywords)
        return Response(answer.text, nodes, metadata=answer.stats)

    async def acustom_query(self, query_str: str) -> Response | StreamingResponse:
        return await asyncio.to_thread(self.custom_query, query_str)

    def _chunk(self, node: TextNode) -> refrain.Chunk | refrain.Document:
        kept = node.metadata
        if "document" in kept and "part" in kept:
            return self.engine.chunks(kept["document"], [kept["part"]])[0]
        return refrain.Document(node.text, title=kept.get("title", ""))


def query_engine(engine: refrain.Engine, streaming: bool = False, **keywords: Any) -> RefrainQueryEngine:
    """A query engine over all that the engine keeps."""
    retriever = RefrainRetriever(engine)
    return RefrainQueryEngine(engine=engine, retriever=retriever, keywords=keywords, streaming=streaming)


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
    answer = query_engine(engine, max_tokens=args.max_tokens).query(args.question)
    stats = answer.metadata
    print(answer.response)
    reused = stats["cached_tokens"] - stats["prefilled_tokens"]
    print(f"{reused} of {stats['prompt_tokens']} tokens reused, first token after {stats['ttft']:.2f} s")


if __name__ == "__main__":
    main()

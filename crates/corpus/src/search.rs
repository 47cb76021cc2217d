//! BM25 search in the chunks of documents. The index is held in memory and built at every start from the document store.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tantivy::collector::{Count, TopDocs};
use tantivy::query::{Bm25StatisticsProvider, BooleanQuery, ConstScoreQuery, Occur, Query, TermQuery};
use tantivy::schema::{
    Field, INDEXED, IndexRecordOption, STORED, STRING, Schema, TextFieldIndexing, TextOptions, Value,
};
use tantivy::tokenizer::{Token, TokenStream, Tokenizer};
use tantivy::{Index, IndexReader, IndexWriter, ReloadPolicy, Searcher, TantivyDocument, Term, doc};
use unicode_segmentation::UnicodeSegmentation;

use crate::error::{Error, Result};

/// Memory of the index's writer, in bytes: the least that tantivy accepts.
const WRITER_BYTES: usize = 16 << 20;
/// Most words of a question that are searched for.
const MAX_QUERY_WORDS: usize = 256;
/// Most bytes of a word that is indexed.
const MAX_WORD_BYTES: usize = 128;
/// Name of [`WordTokenizer`] in the index.
const TOKENIZER: &str = "words";

/// Splits a text into words by UAX #29, in lower case. In scripts without spaces, such as Chinese, each character is a word.
#[derive(Clone, Debug)]
struct WordTokenizer;

/// The words of a text.
struct WordStream {
    words: Vec<Token>,
    /// Index of the next word.
    next: usize,
}

impl Tokenizer for WordTokenizer {
    type TokenStream<'a> = WordStream;

    fn token_stream<'a>(&'a mut self, text: &'a str) -> WordStream {
        let words = text.unicode_word_indices().filter(|(_, word)| word.len() <= MAX_WORD_BYTES).enumerate();
        let words = words.map(|(position, (from, word))| Token {
            offset_from: from,
            offset_to: from + word.len(),
            position,
            text: word.to_lowercase(),
            position_length: 1,
        });
        WordStream { words: words.collect(), next: 0 }
    }
}

impl TokenStream for WordStream {
    fn advance(&mut self) -> bool {
        self.next += 1;
        self.next <= self.words.len()
    }

    fn token(&self) -> &Token {
        &self.words[self.next - 1]
    }

    fn token_mut(&mut self) -> &mut Token {
        &mut self.words[self.next - 1]
    }
}

/// A chunk that a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Hit {
    /// Id of its document.
    pub document: String,
    /// Index of the chunk in its document.
    pub chunk: u32,
    /// BM25 score.
    pub score: f32,
}

/// An index of the chunks of all namespaces; a search sees one namespace.
pub(crate) struct SearchIndex {
    index: Index,
    reader: IndexReader,
    writer: Mutex<IndexWriter>,
    /// Number of words of each document, by namespace.
    word_counts: Mutex<HashMap<String, HashMap<String, u64>>>,
    fields: Fields,
}

/// BM25's statistics of one namespace, so that other tenants' texts change neither scores nor order.
struct NamespaceStatistics<'a> {
    searcher: &'a Searcher,
    namespace: Term,
    chunks: u64,
    words: u64,
}

impl NamespaceStatistics<'_> {
    /// Number of the namespace's chunks, or of those that have `term`.
    fn count(&self, term: Option<&Term>) -> tantivy::Result<u64> {
        let of = |term: &Term| -> (Occur, Box<dyn Query>) {
            (Occur::Must, Box::new(TermQuery::new(term.clone(), IndexRecordOption::Basic)))
        };
        let query = BooleanQuery::new(term.iter().copied().chain([&self.namespace]).map(of).collect());
        Ok(self.searcher.search(&query, &Count)? as u64)
    }
}

impl Bm25StatisticsProvider for NamespaceStatistics<'_> {
    fn total_num_tokens(&self, _: Field) -> tantivy::Result<u64> {
        Ok(self.words)
    }

    fn total_num_docs(&self) -> tantivy::Result<u64> {
        Ok(self.chunks)
    }

    fn doc_freq(&self, term: &Term) -> tantivy::Result<u64> {
        self.count(Some(term))
    }
}

#[derive(Clone, Copy)]
struct Fields {
    /// `NAMESPACE/ID`.
    document: Field,
    namespace: Field,
    chunk: Field,
    text: Field,
}

fn failed(error: tantivy::TantivyError) -> Error {
    Error::Index(error.into())
}

impl SearchIndex {
    pub(crate) fn new() -> Result<SearchIndex> {
        let words = TextFieldIndexing::default().set_tokenizer(TOKENIZER);
        let words = words.set_index_option(IndexRecordOption::WithFreqs);
        let mut schema = Schema::builder();
        let fields = Fields {
            document: schema.add_text_field("document", STRING | STORED),
            namespace: schema.add_text_field("namespace", STRING),
            chunk: schema.add_u64_field("chunk", INDEXED | STORED),
            text: schema.add_text_field("text", TextOptions::default().set_indexing_options(words)),
        };
        let index = Index::create_in_ram(schema.build());
        index.tokenizers().register(TOKENIZER, WordTokenizer);
        let writer = index.writer_with_num_threads(1, WRITER_BYTES).map_err(failed)?;
        let reader = index.reader_builder().reload_policy(ReloadPolicy::Manual).try_into().map_err(failed)?;
        Ok(SearchIndex { index, reader, writer: Mutex::new(writer), word_counts: Mutex::default(), fields })
    }

    /// Indexes the chunk texts of documents, given by namespace and id, in place of those that the ids had before.
    pub(crate) fn add(
        &self,
        documents: impl IntoIterator<Item = (String, String, Vec<String>)>,
    ) -> Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let Fields { document, namespace: of, chunk, text } = self.fields;
        for (namespace, id, chunks) in documents {
            let name = document_term(&namespace, &id);
            writer.delete_term(Term::from_field_text(document, &name));
            let words = chunks.iter().map(|text| self.words(text).map(|words| words.len() as u64));
            let words = words.sum::<Result<u64>>()?;
            for (index, chunk_text) in chunks.into_iter().enumerate() {
                let entry = doc!(
                    document => name.clone(), of => namespace_term(&namespace), chunk => index as u64, text => chunk_text
                );
                writer.add_document(entry).map_err(failed)?;
            }
            self.word_counts().entry(namespace).or_default().insert(id, words);
        }
        writer.commit().map_err(failed)?;
        self.reader.reload().map_err(failed)
    }

    pub(crate) fn remove(&self, namespace: &str, id: &str) -> Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.delete_term(Term::from_field_text(self.fields.document, &document_term(namespace, id)));
        self.word_counts().get_mut(namespace).map(|documents| documents.remove(id));
        writer.commit().map_err(failed)?;
        self.reader.reload().map_err(failed)
    }

    fn word_counts(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, u64>>> {
        self.word_counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The words of a text, in order.
    fn words(&self, text: &str) -> Result<Vec<String>> {
        let mut analyzer = self.index.tokenizer_for_field(self.fields.text).map_err(failed)?;
        let mut words = Vec::new();
        analyzer.token_stream(text).process(&mut |token| words.push(token.text.clone()));
        Ok(words)
    }

    /// The `limit` chunks of a namespace that match a question best, best first; ties go to the earlier document and chunk.
    pub(crate) fn search(&self, namespace: &str, question: &str, limit: usize) -> Result<Vec<Hit>> {
        let mut seen = HashSet::new();
        let words = self.words(question)?.into_iter().filter(|word| seen.insert(word.clone()));
        let words = words.take(MAX_QUERY_WORDS).map(|word| Term::from_field_text(self.fields.text, &word));
        let words: Vec<Term> = words.collect();
        if words.is_empty() || limit == 0 {
            return Ok(Vec::new());
        }
        let namespace_field = Term::from_field_text(self.fields.namespace, &namespace_term(namespace));
        let searcher = self.reader.searcher();
        let total_words = self.word_counts().get(namespace).map_or(0, |documents| documents.values().sum());
        let mut statistics = NamespaceStatistics {
            searcher: &searcher,
            namespace: namespace_field.clone(),
            chunks: 0,
            words: total_words,
        };
        statistics.chunks = statistics.count(None).map_err(failed)?;
        if statistics.chunks == 0 {
            return Ok(Vec::new());
        }
        let limit = limit.min(usize::try_from(statistics.chunks).unwrap_or(usize::MAX));
        let of = |term: Term, record| -> Box<dyn Query> { Box::new(TermQuery::new(term, record)) };
        let any = words.into_iter().map(|word| (Occur::Should, of(word, IndexRecordOption::WithFreqs)));
        // The namespace filters and adds nothing to the score.
        let in_namespace = ConstScoreQuery::new(of(namespace_field, IndexRecordOption::Basic), 0.0);
        let query = BooleanQuery::new(vec![
            (Occur::Must, Box::new(BooleanQuery::new(any.collect())) as Box<dyn Query>),
            (Occur::Must, Box::new(in_namespace)),
        ]);
        // Among chunks of one score the collector takes those that were indexed first, which a restart changes. So all of the last
        // score are collected, and sorted below.
        let mut wanted = limit.saturating_add(1);
        let found = loop {
            let best = TopDocs::with_limit(wanted).order_by_score();
            let found =
                searcher.search_with_statistics_provider(&query, &best, &statistics).map_err(failed)?;
            let is_tied = found.len() == wanted && found[limit - 1].0 == found[wanted - 1].0;
            if !is_tied {
                break found;
            }
            wanted = wanted.saturating_mul(2);
        };
        let mut hits = Vec::with_capacity(found.len());
        for (score, address) in found {
            let entry: TantivyDocument = searcher.doc(address).map_err(failed)?;
            let document = entry.get_first(self.fields.document).and_then(|value| value.as_str());
            let chunk = entry.get_first(self.fields.chunk).and_then(|value| value.as_u64());
            if let (Some(document), Some(chunk)) = (document, chunk) {
                let document = document.rsplit_once('/').map_or(document, |(_, id)| id).to_owned();
                hits.push(Hit { document, chunk: chunk as u32, score });
            }
        }
        hits.sort_by(|a, b| {
            b.score.total_cmp(&a.score).then_with(|| (&a.document, a.chunk).cmp(&(&b.document, b.chunk)))
        });
        hits.truncate(limit);
        Ok(hits)
    }
}

fn document_term(namespace: &str, id: &str) -> String {
    format!("{namespace}/{id}")
}

/// The namespace may be empty, and a term may not.
fn namespace_term(namespace: &str) -> String {
    format!("={namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_that_speaks_of_it_is_found_in_its_own_namespace() {
        let search = SearchIndex::new().unwrap();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let add = |namespace: &str, documents: Vec<(String, Vec<String>)>| {
            let entry = |(id, texts)| (namespace.to_owned(), id, texts);
            search.add(documents.into_iter().map(entry)).unwrap();
        };
        let torque = texts(&["A stem bolt is tightened to 5 Nm.", "Carbon paste helps."]);
        let wheels = texts(&["The rear wheel has 28 spokes."]);
        add("", vec![("torque".to_owned(), torque), ("wheels".to_owned(), wheels)]);
        add("other", vec![("secret".to_owned(), texts(&["How tight is a stem bolt? Very."]))]);
        let best = |namespace, question, most| search.search(namespace, question, most).unwrap();
        let hits = best("", "How tight is a STEM bolt?", 5);
        assert_eq!((hits[0].document.as_str(), hits[0].chunk), ("torque", 0));
        assert!(hits.iter().all(|hit| hit.document != "secret"));
        assert_eq!(best("", "carbon", 5)[0].chunk, 1);
        assert_eq!(best("", "The wheel, the bolt", 1).len(), 1);
        assert!(
            best("", "", 5).is_empty()
                && best("", "zebra", 5).is_empty()
                && best("none", "bolt", 5).is_empty()
        );
        // Documents of another namespace change no score.
        let before = best("", "stem bolt", 5);
        add("other", vec![("more".to_owned(), texts(&["bolt bolt bolt", "a stem", "stem stem bolt"]))]);
        assert_eq!(best("", "stem bolt", 5), before);
        // Chunks of one score come in the order of their documents, whichever was indexed first.
        let twins = (0..9).rev().map(|index| (format!("twin {index}"), texts(&["a hub gear"]))).collect();
        add("twins", twins);
        let found: Vec<String> = best("twins", "hub", 3).into_iter().map(|hit| hit.document).collect();
        assert_eq!(found, ["twin 0", "twin 1", "twin 2"]);
        assert_eq!(best("twins", "hub", usize::MAX).len(), 9);
        // A question is words, never a query in tantivy's language.
        assert!(best("", "\"stem AND (NOT text:*", 5).len() == 1);
        add("", vec![("torque".to_owned(), texts(&["Nothing of it is left."]))]);
        assert!(best("", "stem", 5).is_empty());
        // Scripts without spaces, and words with marks and capitals.
        let foreign = [
            ("bolt", "螺栓用五牛米的力矩拧紧。请使用碳纤维膏。"),
            ("wheel", "後輪には二十八本のスポークがあります。"),
            ("straße", "Die STRASSE über Köln, ÇA VA."),
        ];
        add("", foreign.map(|(id, text)| (id.to_owned(), texts(&[text]))).to_vec());
        assert_eq!(best("", "螺栓的力矩是多少？", 1)[0].document, "bolt");
        assert_eq!(best("", "後輪のスポーク", 1)[0].document, "wheel");
        assert_eq!(best("", "köln ça", 1)[0].document, "straße");
        search.remove("", "wheels").unwrap();
        assert!(best("", "spokes", 5).is_empty());
    }
}

//! Search in the chunks of documents by BM25, held in memory and made anew from the library at every start.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tantivy::collector::{Count, TopDocs};
use tantivy::query::{Bm25StatisticsProvider, BooleanQuery, Occur, Query, TermQuery};
use tantivy::schema::{
    Field, INDEXED, IndexRecordOption, STORED, STRING, Schema, TextFieldIndexing, TextOptions, Value,
};
use tantivy::tokenizer::{Token, TokenStream, Tokenizer};
use tantivy::{Index, IndexReader, IndexWriter, ReloadPolicy, Searcher, TantivyDocument, Term, doc};
use unicode_segmentation::UnicodeSegmentation;

use crate::error::{Problem, Result};

/// Memory of the index's writer, in bytes: the least that it takes.
const WRITER: usize = 16 << 20;

/// Most words of a question that count.
const WORDS: usize = 256;

/// Name of [`Words`] in the index.
const TOKENIZER: &str = "words";
/// Most bytes of a word that counts.
const WORD: usize = 128;

/// Words by UAX #29, in lower case: of scripts without spaces, such as Chinese, each character is one.
#[derive(Clone, Debug)]
struct Words;

/// Words that were found.
struct Found {
    words: Vec<Token>,
    /// The next one.
    next: usize,
}

impl Tokenizer for Words {
    type TokenStream<'a> = Found;

    fn token_stream<'a>(&'a mut self, text: &'a str) -> Found {
        let words = text.unicode_word_indices().filter(|(_, word)| word.len() <= WORD).enumerate();
        let words = words.map(|(position, (from, word))| Token {
            offset_from: from,
            offset_to: from + word.len(),
            position,
            text: word.to_lowercase(),
            position_length: 1,
        });
        Found { words: words.collect(), next: 0 }
    }
}

impl TokenStream for Found {
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

/// A chunk of a document that answers a question.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hit {
    pub(crate) document: String,
    /// Which part of it.
    pub(crate) part: usize,
    pub(crate) score: f32,
}

pub(crate) struct Search {
    index: Index,
    reader: IndexReader,
    writer: Mutex<IndexWriter>,
    /// Words of each document, by namespace.
    words: Mutex<HashMap<String, HashMap<String, u64>>>,
    fields: Fields,
}

/// What BM25 weighs by, of one namespace alone: others' texts change neither scores nor order.
struct Own<'a> {
    searcher: &'a Searcher,
    namespace: Term,
    documents: u64,
    words: u64,
}

impl Own<'_> {
    fn count(&self, term: Option<&Term>) -> tantivy::Result<u64> {
        let of = |term: &Term| -> (Occur, Box<dyn Query>) {
            (Occur::Must, Box::new(TermQuery::new(term.clone(), IndexRecordOption::Basic)))
        };
        let query = BooleanQuery::new(term.iter().copied().chain([&self.namespace]).map(of).collect());
        Ok(self.searcher.search(&query, &Count)? as u64)
    }
}

impl Bm25StatisticsProvider for Own<'_> {
    fn total_num_tokens(&self, _: Field) -> tantivy::Result<u64> {
        Ok(self.words)
    }

    fn total_num_docs(&self) -> tantivy::Result<u64> {
        Ok(self.documents)
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
    part: Field,
    text: Field,
}

fn failed(error: tantivy::TantivyError) -> Problem {
    Problem::internal(&error)
}

impl Search {
    pub(crate) fn new() -> Result<Search> {
        let words = TextFieldIndexing::default().set_tokenizer(TOKENIZER);
        let words = words.set_index_option(IndexRecordOption::WithFreqs);
        let mut schema = Schema::builder();
        let fields = Fields {
            document: schema.add_text_field("document", STRING | STORED),
            namespace: schema.add_text_field("namespace", STRING),
            part: schema.add_u64_field("part", INDEXED | STORED),
            text: schema.add_text_field("text", TextOptions::default().set_indexing_options(words)),
        };
        let index = Index::create_in_ram(schema.build());
        index.tokenizers().register(TOKENIZER, Words);
        let writer = index.writer_with_num_threads(1, WRITER).map_err(failed)?;
        let reader = index.reader_builder().reload_policy(ReloadPolicy::Manual).try_into().map_err(failed)?;
        Ok(Search { index, reader, writer: Mutex::new(writer), words: Mutex::default(), fields })
    }

    /// Enters documents, each with the texts of its chunks; those that are there are replaced.
    pub(crate) fn add(
        &self,
        namespace: &str,
        documents: impl IntoIterator<Item = (String, Vec<String>)>,
    ) -> Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let Fields { document, namespace: of, part, text } = self.fields;
        for (id, chunks) in documents {
            let name = name(namespace, &id);
            writer.delete_term(Term::from_field_text(document, &name));
            let words = chunks.iter().map(|chunk| self.words_of(chunk).map(|words| words.len() as u64));
            let words = words.sum::<Result<u64>>()?;
            self.words().entry(namespace.to_owned()).or_default().insert(id, words);
            for (index, chunk) in chunks.into_iter().enumerate() {
                let entry =
                    doc!(document => name.clone(), of => key(namespace), part => index as u64, text => chunk);
                writer.add_document(entry).map_err(failed)?;
            }
        }
        writer.commit().map_err(failed)?;
        self.reader.reload().map_err(failed)
    }

    pub(crate) fn remove(&self, namespace: &str, id: &str) -> Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.delete_term(Term::from_field_text(self.fields.document, &name(namespace, id)));
        self.words().get_mut(namespace).map(|documents| documents.remove(id));
        writer.commit().map_err(failed)?;
        self.reader.reload().map_err(failed)
    }

    fn words(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, u64>>> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The words of a text, in order.
    fn words_of(&self, text: &str) -> Result<Vec<String>> {
        let mut analyzer = self.index.tokenizer_for_field(self.fields.text).map_err(failed)?;
        let mut words = Vec::new();
        analyzer.token_stream(text).process(&mut |token| words.push(token.text.clone()));
        Ok(words)
    }

    /// The best chunks of a namespace for a question, best first; ties go to the earlier document and part.
    pub(crate) fn best(&self, namespace: &str, question: &str, most: usize) -> Result<Vec<Hit>> {
        let mut seen = HashSet::new();
        let words = self.words_of(question)?.into_iter().filter(|word| seen.insert(word.clone()));
        let words = words.take(WORDS).map(|word| Term::from_field_text(self.fields.text, &word));
        let words: Vec<Term> = words.collect();
        if words.is_empty() || most == 0 {
            return Ok(Vec::new());
        }
        let of = |term: Term, record| -> Box<dyn Query> { Box::new(TermQuery::new(term, record)) };
        let any = words.into_iter().map(|word| (Occur::Should, of(word, IndexRecordOption::WithFreqs)));
        let own = Term::from_field_text(self.fields.namespace, &key(namespace));
        let query = BooleanQuery::new(vec![
            (Occur::Must, Box::new(BooleanQuery::new(any.collect())) as Box<dyn Query>),
            // It filters, and scores all alike.
            (
                Occur::Must,
                Box::new(tantivy::query::ConstScoreQuery::new(of(own, IndexRecordOption::Basic), 0.0)),
            ),
        ]);
        let searcher = self.reader.searcher();
        let own = Term::from_field_text(self.fields.namespace, &key(namespace));
        let words = self.words().get(namespace).map_or(0, |documents| documents.values().sum());
        let mut own = Own { searcher: &searcher, namespace: own, documents: 0, words };
        own.documents = own.count(None).map_err(failed)?;
        if own.documents == 0 {
            return Ok(Vec::new());
        }
        let best = TopDocs::with_limit(most).order_by_score();
        let found = searcher.search_with_statistics_provider(&query, &best, &own).map_err(failed)?;
        let mut hits = Vec::with_capacity(found.len());
        for (score, address) in found {
            let entry: TantivyDocument = searcher.doc(address).map_err(failed)?;
            let document = entry.get_first(self.fields.document).and_then(|value| value.as_str());
            let part = entry.get_first(self.fields.part).and_then(|value| value.as_u64());
            if let (Some(document), Some(part)) = (document, part) {
                let document = document.rsplit_once('/').map_or(document, |(_, id)| id).to_owned();
                hits.push(Hit { document, part: part as usize, score });
            }
        }
        hits.sort_by(|a, b| {
            b.score.total_cmp(&a.score).then_with(|| (&a.document, a.part).cmp(&(&b.document, b.part)))
        });
        Ok(hits)
    }
}

fn name(namespace: &str, id: &str) -> String {
    format!("{namespace}/{id}")
}

/// A namespace may have no name, and a term may not be empty.
fn key(namespace: &str) -> String {
    format!("={namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_that_speaks_of_it_is_found_in_its_own_namespace() {
        let search = Search::new().unwrap();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        search
            .add(
                "",
                [
                    (
                        "torque".to_owned(),
                        texts(&["A stem bolt is tightened to 5 Nm.", "Carbon paste helps."]),
                    ),
                    ("wheels".to_owned(), texts(&["The rear wheel has 28 spokes."])),
                ],
            )
            .unwrap();
        search.add("other", [("secret".to_owned(), texts(&["How tight is a stem bolt? Very."]))]).unwrap();
        let best = |namespace, question, most| search.best(namespace, question, most).unwrap();
        let hits = best("", "How tight is a STEM bolt?", 5);
        assert_eq!((hits[0].document.as_str(), hits[0].part), ("torque", 0));
        assert!(hits.iter().all(|hit| hit.document != "secret"));
        assert_eq!(best("", "carbon", 5)[0].part, 1);
        assert_eq!(best("", "The wheel, the bolt", 1).len(), 1);
        assert!(
            best("", "", 5).is_empty()
                && best("", "zebra", 5).is_empty()
                && best("none", "bolt", 5).is_empty()
        );
        // What others keep changes no score.
        let before = best("", "stem bolt", 5);
        search
            .add("other", [("more".to_owned(), texts(&["bolt bolt bolt", "a stem", "stem stem bolt"]))])
            .unwrap();
        assert_eq!(best("", "stem bolt", 5), before);
        // What stands in a question is never a query's language.
        assert!(best("", "\"stem AND (NOT text:*", 5).len() == 1);
        search.add("", [("torque".to_owned(), texts(&["Nothing of it is left."]))]).unwrap();
        assert!(best("", "stem", 5).is_empty());
        // Scripts without spaces, and words with marks and capitals.
        let foreign = [
            ("bolt", "螺栓用五牛米的力矩拧紧。请使用碳纤维膏。"),
            ("wheel", "後輪には二十八本のスポークがあります。"),
            ("straße", "Die STRASSE über Köln, ÇA VA."),
        ];
        search.add("", foreign.map(|(id, text)| (id.to_owned(), texts(&[text])))).unwrap();
        assert_eq!(best("", "螺栓的力矩是多少？", 1)[0].document, "bolt");
        assert_eq!(best("", "後輪のスポーク", 1)[0].document, "wheel");
        assert_eq!(best("", "köln ça", 1)[0].document, "straße");
        search.remove("", "wheels").unwrap();
        assert!(best("", "spokes", 5).is_empty());
    }
}
